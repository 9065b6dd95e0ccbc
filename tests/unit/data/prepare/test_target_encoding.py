"""Target encoding, without leaking the label of a train record into its own encoding."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from sklearn.preprocessing import TargetEncoder

from echelon.core.errors import DataError
from echelon.data.prepare.features.supervised import Target
from echelon.data.prepare.steps import Columns
from echelon.data.prepare.workdir import pack

from .fitting import encode, feature, learn

ROWS = 600
RNG = np.random.default_rng(0)
TOWN = RNG.choice(["Ulm", "Bonn", "Kiel", "Hof"], ROWS, p=[0.5, 0.3, 0.15, 0.05])
SIZE = RNG.integers(0, 9, ROWS)
PRICE = SIZE * 10 + (TOWN == "Ulm") * 5 + RNG.normal(size=ROWS) * 9
KIND = np.where(PRICE > 50, "dear", np.where(PRICE > 20, "fair", "cheap"))
LABELS: dict[str, Any] = {"price": PRICE, "dear": PRICE > 50, "kind": KIND}
RECORDS: dict[str, Any] = {"@split": np.zeros(ROWS, np.int8), "@record": np.arange(ROWS)}
COLUMNS: dict[str, Any] = {
    "town": pa.array(TOWN),
    "size": pa.array(SIZE),
    **{name: pa.array(label) for name, label in LABELS.items()},
}
X = np.stack([TOWN.astype(object), SIZE.astype(object)], 1)
CASES = [
    ("price", "number", "auto", "continuous"),
    ("price", "number", 10.0, "continuous"),
    ("dear", "number", 3.0, "binary"),
    ("dear", "class", "auto", "binary"),
    ("kind", "class", "auto", "multiclass"),
    ("kind", "class", 2.0, "multiclass"),
]


def made(label: str, of: str, smooth: Any, source: Any = ("town", "size")) -> Target:
    found = feature("target", list(source), label=label, of=of, smooth=smooth)
    assert isinstance(found, Target)
    return found


@pytest.mark.parametrize(("label", "of", "smooth", "kind"), CASES)
def test_as_by_scikit_learn(
    label: str, of: str, smooth: Any, kind: Literal["continuous", "binary", "multiclass"]
) -> None:
    target = made(label, of, smooth)
    learnt = learn(target, COLUMNS | RECORDS)
    theirs = TargetEncoder(target_type=kind, smooth=smooth).fit(X, LABELS[label])
    np.testing.assert_allclose(encode(target, COLUMNS, learnt), theirs.transform(X), rtol=1e-5)


@pytest.mark.parametrize(("label", "of", "smooth", "kind"), CASES)
def test_a_fold_is_encoded_by_the_others(
    label: str, of: str, smooth: Any, kind: Literal["continuous", "binary", "multiclass"]
) -> None:
    target = made(label, of, smooth)
    columns = COLUMNS | RECORDS
    ours = encode(target, columns, learn(target, columns))
    folds = target._fold(columns)
    assert np.bincount(folds).min() > 80
    for fold in range(5):
        own = folds == fold
        theirs = TargetEncoder(target_type=kind, smooth=smooth).fit(X[~own], LABELS[label][~own])
        np.testing.assert_allclose(ours[own], theirs.transform(X[own]), rtol=1e-5, atol=1e-7)


def test_a_category_of_one_record_does_not_tell_its_label() -> None:
    columns = {**COLUMNS, **RECORDS, "town": pa.array([f"town {n}" for n in range(ROWS)])}
    target = made("price", "number", 0, ["town"])
    found = encode(target, columns, learn(target, columns))
    assert len(np.unique(found)) == 5, "the mean of the other folds, whatever the town"
    assert abs(np.corrcoef(found, PRICE)[0, 1]) < 0.15


def test_held_out_records_are_encoded_by_all_of_train() -> None:
    columns = COLUMNS | RECORDS
    target = made("price", "number", "auto")
    learnt = learn(target, columns)
    held = columns | {"@split": np.ones(ROWS, np.int8)}
    assert (encode(target, held, learnt) == encode(target, COLUMNS, learnt)).all()
    assert (encode(target, columns, learnt) != encode(target, COLUMNS, learnt)).any(1).all()


def test_unseen_categories_get_the_mean_and_missing_ones_have_their_own() -> None:
    columns: Columns = {
        "a": pa.array(["x", "x", None, None]),
        "y": pa.array([1.0, 3.0, 6.0, 10.0]),
        "@split": np.zeros(4, np.int8),
        "@record": np.arange(4),
    }
    target = made("y", "number", 0, ["a"])
    new: Columns = {"a": pa.array(["x", None, "new"])}
    assert encode(target, new, learn(target, columns)).tolist() == [2, 8, 5]


def test_records_without_a_label_are_not_learnt_from() -> None:
    y = pa.array([None if n < 100 else PRICE[n] for n in range(ROWS)])
    target = made("price", "number", "auto")
    ours = learn(target, COLUMNS | RECORDS | {"price": y})
    theirs = TargetEncoder(target_type="continuous").fit(X[100:], PRICE[100:])
    np.testing.assert_allclose(encode(target, COLUMNS, ours), theirs.transform(X), rtol=1e-5)


def test_a_label_that_is_an_empty_text_is_not_learnt_from() -> None:
    absent = [["" if n < 100 else KIND[n] for n in range(ROWS)]]
    absent.append([label or None for label in absent[0]])
    target = made("kind", "class", 2.0)
    empty, null = (learn(target, COLUMNS | RECORDS | {"kind": pa.array(y)}) for y in absent)
    assert empty["classes"].to_pylist() == ["cheap", "dear", "fair"]
    assert pack(empty) == pack(null)


def test_blocks_of_any_size_teach_the_same() -> None:
    target = made("price", "number", "auto")
    tables = [learn(target, COLUMNS | RECORDS, size)["table 1"] for size in (7, 100, ROWS)]
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-12)
    np.testing.assert_allclose(tables[0], tables[2], rtol=1e-12)


def test_train_data_without_anything_to_learn_is_refused() -> None:
    target = made("kind", "number", "auto")
    with pytest.raises(DataError, match="label 'kind' is of type string: say `of: class`"):
        learn(target, COLUMNS | RECORDS)
    with pytest.raises(DataError, match="label 'kind' has one class in train"):
        learn(made("kind", "class", "auto"), COLUMNS | RECORDS | {"kind": pa.array(["a"] * ROWS)})
    nothing = pa.nulls(ROWS, pa.float64())
    with pytest.raises(DataError, match="no record of train has a 'price'"):
        learn(made("price", "number", "auto"), COLUMNS | RECORDS | {"price": nothing})
    with pytest.raises(DataError, match="column 'prize' is unknown; did you mean 'price'"):
        learn(made("prize", "number", "auto"), COLUMNS | RECORDS)


@pytest.mark.parametrize(("label", "of"), [("price", "number"), ("kind", "class")])
def test_numbered_texts_are_the_same_as_plain_ones(label: str, of: str) -> None:
    plain = {**COLUMNS, **RECORDS}
    numbered = {**plain, "town": COLUMNS["town"].dictionary_encode()}
    feature = made(label, of, "auto")
    learnt = learn(feature, plain)
    assert pack(learn(feature, numbered)) == pack(learnt)
    assert (encode(feature, numbered, learnt) == encode(feature, plain, learnt)).all()
