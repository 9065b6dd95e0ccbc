"""The synthetic click log and its best possible AUC."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from echelon.core.config import DataSection
from echelon.core.errors import DataError
from echelon.data import ClickOptions, make_clicks, open_dense, open_table
from echelon.data.synthetic import auc

SMALL = ClickOptions(rows=5000, fields=3, vocabulary=50, numbers=2)


def test_it_is_the_same_for_the_same_seed_alone() -> None:
    first = make_clicks(SMALL)
    assert first.equals(make_clicks(SMALL))
    other = make_clicks(ClickOptions(rows=5000, fields=3, vocabulary=50, numbers=2, seed=1))
    assert not first.equals(other)


def test_ids_are_skewed_and_start_at_one() -> None:
    ids = make_clicks(SMALL).column("ids").combine_chunks().to_numpy_ndarray()
    assert ids.min() >= 1
    assert ids.max() <= 50
    counts = np.bincount(ids[:, 0], minlength=51)[1:]
    assert counts[0] > 5 * counts[9] > 0


def test_clicks_follow_the_true_chance() -> None:
    table = make_clicks(ClickOptions(rows=50_000, fields=3, vocabulary=50, numbers=2))
    chance = table.column("chance").to_numpy()
    y = table.column("y").to_numpy()
    for low in np.arange(0.0, 1.0, 0.2):
        inside = (chance >= low) & (chance < low + 0.2)
        error = 4 * np.sqrt(0.25 / inside.sum())
        assert y[inside].mean() == pytest.approx(chance[inside].mean(), abs=error)
    assert 0.1 < y.mean() < 0.5


def test_the_auc_agrees_with_scikit_learn_ties_included() -> None:
    random = np.random.default_rng(0)
    scores = random.integers(0, 20, 500) / 20
    y = random.random(500) < scores
    assert auc(scores, y) == pytest.approx(roc_auc_score(y, scores), abs=1e-12)


def test_the_best_auc_is_that_of_the_held_out_chances() -> None:
    section = DataSection(name="clicks", options={"rows": 5000, "fields": 3, "vocabulary": 50})
    splits = open_table(section, 7)
    best = splits.about["best_auc"]
    assert 0.7 < best < 0.95
    assert splits.valid is not None
    assert (len(splits.train), len(splits.valid)) == (4000, 1000)
    assert splits.fitted["cardinalities"] == [51, 51, 51]
    assert splits.shape == (4,)
    again = open_table(section, 7, fitted=splits.fitted)
    assert len(again.train) == 5000
    assert again.about["best_auc"] != best


def test_a_single_field_works() -> None:
    assert make_clicks(ClickOptions(rows=100, fields=1, numbers=1)).num_rows == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row": 100}, "option of data set 'clicks' 'row' is unknown; did you mean 'rows'"),
        ({"rows": 3}, "data.options.rows is 3: it must be at least 100"),
        ({"rows": "many"}, "data.options.rows is 'many'"),
        ({"fields": True}, "data.options.fields is True"),
        ({"seed": 1.5}, "data.options.seed is 1.5"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(DataError) as error:
        open_table(DataSection(name="clicks", options=options), 0)
    assert message in str(error.value)


def test_it_is_not_for_models_of_vectors() -> None:
    with pytest.raises(DataError, match="it is for the task 'click_rate'"):
        open_dense(DataSection(name="clicks"), 0, target="class")
