"""Features of categories: one_hot, hashed and cross; and join."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.preprocessing import OneHotEncoder

from echelon.core.errors import DataError
from echelon.data.prepare.features import categories
from echelon.data.prepare.steps import Columns, Ragged, Sparse
from echelon.data.prepare.workdir import pack

from .fitting import dense, encode, feature, fit, learn

RNG = np.random.default_rng(0)
WORDS = RNG.choice(
    ["tea", "coffee", "water", "Äpfel", "", "茶"], 500, p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.05]
)
TEXTS = pa.array([None if RNG.random() < 0.1 else str(word) for word in WORDS])
NUMBERS = pa.array(RNG.integers(-3, 4, 500).astype(np.int16))
FLAGS = pa.array(RNG.random(500) < 0.5)
COLUMNS: dict[str, Any] = {"text": TEXTS, "number": NUMBERS, "flag": FLAGS}
NAMES = list(COLUMNS)


def as_objects(columns: dict[str, Any]) -> Any:
    return np.array([column.to_pylist() for column in columns.values()], object).T


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_one_hot_as_by_scikit_learn(form: str) -> None:
    theirs = OneHotEncoder(sparse_output=False).fit_transform(as_objects(COLUMNS))
    assert (fit(feature("one_hot", NAMES, form=form), COLUMNS) == theirs).all()


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_utf8()])
def test_numbered_texts_are_the_same_as_plain_ones(form: str, kind: pa.DataType) -> None:
    made = feature("one_hot", "text", form=form, at_least=60)
    numbered = {"text": TEXTS.cast(kind).dictionary_encode()}
    learnt = learn(made, numbered)
    assert pack(learnt) == pack(learn(made, {"text": TEXTS}))
    plain = encode(made, {"text": TEXTS}, learnt)
    assert (encode(made, numbered, learnt) == plain).all()
    assert not plain.any(1).all()  # rare ones are left out
    refusing = feature("one_hot", "text", unseen="refuse", at_least=60)
    told = dict(refusing.refused({"text": TEXTS}, learnt))
    assert dict(refusing.refused(numbered, learnt)) == told != {}


def test_a_list_of_texts_with_a_missing_one_is_read_as_plain_texts() -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None, 0]), pa.array(["a", None, "b"]))
    made = feature("one_hot", "text")
    assert (
        fit(made, {"text": texts}).tolist()
        == fit(made, {"text": pa.array(["a", None, "b", None, "a"])}).tolist()
    )


def test_categories_that_train_lacks_are_zero_everywhere() -> None:
    made = feature("one_hot", "text")
    learnt = learn(made, {"text": pa.array(["b", "a", "b"])})
    found = encode(made, {"text": pa.array(["a", "c", None, "b"])}, learnt)
    assert found.tolist() == [[1, 0], [0, 0], [0, 0], [0, 1]]


def test_categories_that_train_lacks_may_be_refused() -> None:
    made = feature("one_hot", "text", unseen="refuse")
    learnt = learn(made, {"text": pa.array(["b", "a", "b"])})
    found = made.refused({"text": pa.array(["a", "c", None])}, learnt)
    assert dict(found) == {
        1: "feature out: category 'c' is not in train",
        2: "feature out: category None is not in train",
    }
    assert not feature("one_hot", "text").refused({"text": pa.array(["c"])}, learnt)


def test_another_type_than_in_train_is_refused() -> None:
    made = feature("one_hot", "n")
    learnt = learn(made, {"n": pa.array([1, 2])})
    assert encode(made, {"n": pa.array(["2", "1"])}, learnt).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(DataError, match="is of type large_string; in train it was int64"):
        encode(made, {"n": pa.array(["two"])}, learnt)


def test_rare_categories_are_left_out() -> None:
    columns: Columns = {"text": pa.array([*"aaabbbccd", None])}
    learnt = learn(feature("one_hot", "text", at_least=2), columns, 4)
    assert learnt["categories 0"].to_pylist() == ["a", "b", "c"]
    assert learnt["missing"].tolist() == [False]
    few = learn(feature("one_hot", "text", size=1), columns, 4)
    assert few["categories 0"].to_pylist() == ["a"], "of those as frequent, the first"


def test_many_columns_are_sparse_if_nothing_is_said() -> None:
    for count, kind in ((64, np.ndarray), (65, Sparse)):
        columns: Columns = {"n": pa.array(range(count))}
        made = feature("one_hot", "n")
        assert isinstance(made.encode(columns, learn(made, columns))["out"], kind)


def test_categories_of_every_type() -> None:
    plain = pa.array(["x", "y", None])
    columns: Columns = {
        "words": plain.dictionary_encode(),
        "floats": pa.array([0.5, float("nan"), 0.5]),
        "bins": np.array([[0, 1], [1, 1], [2, 0]]),
        "huge": pa.array([2**64 - 1, 0, 0], pa.uint64()),
        "nothing": pa.nulls(3),
    }
    learnt = learn(feature("one_hot", list(columns)), columns, 2)
    assert [len(learnt[f"categories {at}"]) for at in range(6)] == [2, 1, 3, 2, 2, 0]
    assert learnt["missing"].tolist() == [True, True, False, False, False, True]


def test_too_many_categories_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(categories, "MOST", 100)
    monkeypatch.setattr(categories, "_OFTEN", 100)
    with pytest.raises(DataError, match="column 'n' has more than 100 different values: use the"):
        learn(feature("one_hot", "n"), {"n": pa.array(range(101))})


def test_one_hot_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="feature one_hot: n: train has no category"):
        learn(feature("one_hot", "n", at_least=2), {"n": pa.array([1, 2])})


def test_wrong_columns_are_refused() -> None:
    made = feature("one_hot", "a")
    with pytest.raises(DataError, match="column 'a' is of type list"):
        made.check({"a": pa.list_(pa.int8())})
    with pytest.raises(DataError, match="column 'a' is of type binary"):
        made.check({"a": pa.binary()})
    with pytest.raises(DataError, match="column 'a' has several values per record"):
        made.look(0, {"a": Ragged(np.ones(1), np.array([0, 1]))}, {})
    with pytest.raises(DataError, match="feature cross: a alone: name two or more"):
        feature("cross", "a").check({"a": pa.int8()})
    with pytest.raises(DataError, match="made of a, b: say with `to`"):
        feature("join", ["a", "b"], to="").check({"a": pa.int8(), "b": pa.int8()})


def test_buckets_are_even_and_the_same_in_every_block() -> None:
    words = pa.array([f"word {n}" for n in range(20_000)])
    made = feature("hashed", "text", buckets=50)
    found = fit(made, {"text": words})
    assert found.dtype == np.int64
    counts = np.bincount(found, minlength=50)
    assert len(counts) == 50
    assert abs(counts - 400).max() < 5 * 20  # five deviations
    other = feature("hashed", "text", buckets=50, seed=1)
    assert (fit(other, {"text": words}) != found).mean() > 0.9


def test_hashes_see_values_not_types_or_places() -> None:
    made = feature("hashed", "a", buckets=1 << 40)
    texts = encode(made, {"a": pa.array(["x", None, "y", "", "x"])}, {}, 2)
    assert texts[0] == texts[4]
    assert len(np.unique(texts)) == 4
    numbers = [
        encode(made, {"a": values}, {})
        for values in (pa.array([1, 2], pa.int8()), np.array([1, 2]), pa.array([1, 2], pa.int64()))
    ]
    assert (numbers[0] == numbers[1]).all()
    assert (numbers[0] == numbers[2]).all()
    zeros = encode(made, {"a": pa.array([0.0, -0.0])}, {})
    assert zeros[0] == zeros[1]


def test_sources_have_buckets_of_their_own() -> None:
    columns: Columns = {"a": TEXTS, "b": TEXTS}
    found = encode(feature("hashed", ["a", "b"], buckets=1 << 30), columns, {})
    assert found.shape == (500, 2)
    assert (found[:, 0] != found[:, 1]).all()
    numbers = encode(feature("hashed", ["a", "b"], buckets=3), columns, {})
    sparse = encode(feature("hashed", ["a", "b"], buckets=3, form="sparse"), columns, {})
    wanted = np.zeros((500, 3))
    np.add.at(wanted, (np.arange(500)[:, None], numbers), 1)
    assert (sparse == wanted).all()
    assert sparse.max() == 2
    assert feature("hashed", "a", buckets=3).different({}) == 3
    assert feature("hashed", "a", buckets=3, form="sparse").different({}) is None


def test_crosses_are_combinations() -> None:
    columns: Columns = {"a": pa.array(["x", "y", None]), "b": pa.array([1, 2, 3])}
    made = feature("cross", ["a", "b"])
    assert made.encode(columns, {})["out"].to_pylist() == ["x × 1", "y × 2", None]  # type: ignore[union-attr]
    assert made.makes({})["out"] == pa.large_utf8()


def test_crosses_by_bucket() -> None:
    left, right = (pa.array(part.ravel()) for part in np.mgrid[:40, :40])
    made = feature("cross", ["a", "b"], buckets=1 << 40)
    found = encode(made, {"a": left, "b": right}, {})
    assert len(np.unique(found)) == 1600, "1 × 2 is not 2 × 1"
    assert made.makes({})["out"] == pa.null()
    assert made.different({}) == 1 << 40


def test_joined_dense_columns() -> None:
    columns: Columns = {"a": pa.array([1, None]), "b": np.array([[1.5, 2], [3, 4]], np.float32)}
    found = encode(feature("join", ["a", "b"]), columns, {})
    np.testing.assert_array_equal(found, [[1, 1.5, 2], [np.nan, 3, 4]])
    assert found.dtype == np.float32


def test_joined_sparse_columns() -> None:
    sparse = Sparse(np.array([1, 0, 2]), np.array([5, 6, 7], np.float32), np.array([0, 1, 1, 3]), 3)
    numbers = np.array([[0, 1], [2, 0], [0, 0]], np.float32)
    columns: Columns = {"a": sparse, "b": numbers, "c": sparse}
    found = feature("join", ["a", "b", "c"]).encode(columns, {})["out"]
    assert isinstance(found, Sparse)
    assert found.width == 8
    wanted = np.hstack([dense(sparse), numbers, dense(sparse)])
    assert (dense(found) == wanted).all()


def test_rows_of_any_length_are_not_joined() -> None:
    with pytest.raises(DataError, match="column 'a' has rows of different lengths"):
        feature("join", "a").encode({"a": Ragged(np.ones(1), np.array([0, 1]))}, {})
