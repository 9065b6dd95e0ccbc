"""Fewer columns: principal components, truncated SVD, selection, and sparse rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import hstack, random_array
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.decomposition import PCA, TruncatedSVD
from sklearn.feature_selection import mutual_info_classif

from echelon.core.errors import ConfigError, DataError
from echelon.data.prepare.features import projection
from echelon.data.prepare.features.numbers import binned
from echelon.data.prepare.steps import Columns, Ragged, Sparse
from echelon.data.prepare.workdir import pack

from .fitting import dense, encode, feature, fit, learn, named

CANCER = load_breast_cancer()
WIDE: Columns = {"x": CANCER.data, "y": pa.array(CANCER.target)}
DIGITS = load_digits()


def sparse(matrix: Any) -> Sparse:
    rows = matrix.tocsr()
    rows.sort_indices()
    return Sparse(rows.indices, rows.data, rows.indptr.astype(np.int64), rows.shape[1])


@pytest.mark.parametrize("whiten", [False, True])
def test_components_are_those_of_scikit_learn(whiten: bool) -> None:
    made = feature("pca", "x", components=5, whiten=whiten)
    learnt = learn(made, WIDE)
    theirs = PCA(5, svd_solver="full", whiten=whiten).fit(CANCER.data)
    np.testing.assert_allclose(learnt["components"], theirs.components_, atol=1e-8)
    np.testing.assert_allclose(learnt["variances"], theirs.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(learnt["parts"], theirs.explained_variance_ratio_, rtol=1e-9)
    wanted = theirs.transform(CANCER.data)
    np.testing.assert_allclose(encode(made, WIDE, learnt), wanted, rtol=1e-4, atol=1e-4)


def test_as_many_components_as_hold_a_part_of_the_variance() -> None:
    theirs = PCA(0.9, svd_solver="full").fit(DIGITS.data).n_components_
    assert fit(feature("pca", "x", variance=0.9), {"x": DIGITS.data}).shape == (1797, theirs)


def test_a_missing_value_is_the_mean() -> None:
    x = np.random.default_rng(0).normal(size=(300, 4))
    gaps = np.where(np.random.default_rng(1).random(x.shape) < 0.2, np.nan, x)
    filled = np.where(np.isnan(gaps), np.nanmean(gaps, 0), gaps)
    ours = fit(feature("pca", list(named(x)), components=2), named(gaps))
    np.testing.assert_allclose(ours, PCA(2).fit_transform(filled), atol=1e-5)


def test_settings_beyond_pca_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="say `components` or `variance`"):
        feature("pca", "x")
    with pytest.raises(DataError, match="feature pca: 31 components of 30 columns"):
        learn(feature("pca", "x", components=31), WIDE)
    with pytest.raises(DataError, match="feature pca: 5 components of 3 records"):
        learn(feature("pca", "x", components=5), {"x": CANCER.data[:3]})
    with pytest.raises(DataError, match="train has 1 record: two are needed"):
        learn(feature("pca", "x", components=1), {"x": CANCER.data[:1]})
    monkeypatch.setattr(projection, "MOST", 29)
    with pytest.raises(DataError, match="30 columns are more than 29: use the kind `svd`"):
        learn(feature("pca", "x", components=1), WIDE)


def test_svd_of_dense_rows_is_that_of_scikit_learn() -> None:
    made = feature("svd", "x", components=8, iterations=15)
    learnt = learn(made, {"x": DIGITS.data}, 500)
    theirs = TruncatedSVD(8, algorithm="arpack", random_state=0).fit(DIGITS.data)
    np.testing.assert_allclose(learnt["values"], theirs.singular_values_, rtol=1e-7)
    wanted = theirs.transform(DIGITS.data)
    np.testing.assert_allclose(encode(made, {"x": DIGITS.data}, learnt), wanted, atol=1e-2)


def test_svd_of_sparse_rows_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    x = random_array((500, 300), density=0.05, rng=rng, format="csr")
    x = (x * np.geomspace(1, 0.01, 300)).tocsr()
    made = feature("svd", "x", components=5, iterations=20)
    columns: Columns = {"x": sparse(x)}
    learnt = learn(made, columns, 60)
    theirs = TruncatedSVD(5, algorithm="arpack", random_state=0).fit(x)
    np.testing.assert_allclose(learnt["values"], theirs.singular_values_, rtol=1e-7)
    np.testing.assert_allclose(encode(made, columns, learnt), theirs.transform(x), atol=1e-3)
    parts = theirs.singular_values_**2 / (x * x).sum()
    np.testing.assert_allclose(learnt["parts"], parts, rtol=1e-6)


def test_svd_is_as_good_as_scikit_learns_with_one_iteration_less() -> None:
    exact = np.linalg.svd(DIGITS.data, compute_uv=False)[:20]
    learnt = learn(feature("svd", "x", components=20), {"x": DIGITS.data}, 500)
    theirs = TruncatedSVD(20, n_iter=3, random_state=0).fit(DIGITS.data).singular_values_
    assert abs(learnt["values"] / exact - 1).max() < abs(theirs / exact - 1).max() < 0.001


def test_svd_of_few_columns_is_exact() -> None:
    x = np.random.default_rng(0).normal(size=(200, 6))
    learnt = learn(feature("svd", list(named(x)), components=6, iterations=1), named(x))
    np.testing.assert_allclose(learnt["values"], np.linalg.svd(x, compute_uv=False), rtol=1e-10)


def test_the_seed_decides() -> None:
    columns: Columns = {"x": DIGITS.data}
    first, again, other = (
        pack(learn(feature("svd", "x", components=3, iterations=1, seed=seed), columns))
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_settings_beyond_svd_are_refused() -> None:
    with pytest.raises(DataError, match="feature svd: 31 components of 30 columns"):
        learn(feature("svd", "x", components=31), WIDE)
    with pytest.raises(DataError, match="feature svd: train has nothing but zeros"):
        learn(feature("svd", "x", components=1), {"x": np.zeros((3, 3))})
    with pytest.raises(DataError, match="is of rows of any length"):
        learn(feature("svd", "x", components=1), {"x": Ragged(np.ones(1), np.array([0, 1]))})
    with pytest.raises(DataError, match="say with `to`"):
        feature("svd", ["a", "b"], to="", components=1).check({"a": pa.int8(), "b": pa.int8()})


@pytest.mark.parametrize("data", [load_wine(), CANCER, DIGITS], ids=["wine", "cancer", "digits"])
def test_information_is_that_of_scikit_learn(data: Any) -> None:
    columns: Columns = {"x": data.data, "y": pa.array(data.target_names[data.target])}
    made = feature("select", "x", label="y", size=5, bins=12)
    discretised = made.learn(0, [made.look(0, columns, {})], {}, None)  # type: ignore[arg-type]
    bounds = np.split(discretised["bounds"], discretised["sizes"].cumsum()[:-1])
    theirs = mutual_info_classif(binned(data.data, bounds, 12), data.target, discrete_features=True)
    learnt = learn(made, columns)
    np.testing.assert_allclose(learnt["information"], theirs, atol=1e-12)
    assert set(learnt["chosen"]) == set(np.argsort(-theirs, kind="stable")[:5])
    np.testing.assert_array_equal(
        encode(made, columns, learnt), data.data[:, learnt["chosen"]].astype(np.float32)
    )


def test_information_of_sparse_columns_is_that_of_being_there() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 400)
    x = hstack([random_array((400, 50), density=0.1, rng=rng), (y == 1)[:, None] * 1.0])
    columns: Columns = {"x": sparse(x.tocsr()), "y": y}
    made = feature("select", "x", label="y", size=10)
    learnt = learn(made, columns)
    there = (x.toarray() != 0).astype(int)
    theirs = mutual_info_classif(there, y, discrete_features=True)
    np.testing.assert_allclose(learnt["information"], theirs, atol=1e-12)
    assert learnt["information"].argmax() == 50
    np.testing.assert_allclose(
        encode(made, columns, learnt), x.toarray()[:, learnt["chosen"]], rtol=1e-6
    )


def test_information_about_a_number_and_with_gaps() -> None:
    data = load_diabetes()
    x = np.where(np.random.default_rng(0).random(data.data.shape) < 0.1, np.nan, data.data)
    labels = pa.array([None if n % 10 == 0 else value for n, value in enumerate(data.target)])
    columns: Columns = {"x": x, "y": labels}
    learnt = learn(feature("select", "x", label="y", of="number", size=2, bins=4), columns)
    assert learnt["chosen"].tolist() == [2, 8], "body mass and the blood's s5"


def test_rare_values_are_not_lost_in_a_bin() -> None:
    y = np.arange(1000) < 20
    columns: Columns = {"x": np.stack([y, np.arange(1000) % 2], 1).astype(float), "y": pa.array(y)}
    learnt = learn(feature("select", "x", label="y", size=1), columns)
    assert learnt["chosen"].tolist() == [0]
    np.testing.assert_allclose(learnt["information"][0], -0.02 * np.log(0.02) - 0.98 * np.log(0.98))


def test_a_label_that_is_an_empty_text_says_nothing_of_a_column() -> None:
    x = np.stack([np.arange(9) % 3 == 0, np.arange(9) % 2 == 0], 1).astype(float)
    y = ["" if n % 3 == 0 else "ab"[n % 2] for n in range(9)]
    learnt = learn(feature("select", "x", label="y", size=1), {"x": x, "y": pa.array(y)})
    assert learnt["chosen"].tolist() == [1]
    assert learnt["information"][0] == 0


def test_more_columns_than_there_are_cannot_be_selected() -> None:
    with pytest.raises(DataError, match="feature select: 31 of 30 columns"):
        learn(feature("select", "x", label="y", size=31), WIDE)
    with pytest.raises(DataError, match="column 'z' is unknown"):
        learn(feature("select", "x", label="z", size=1), WIDE)
    none: Columns = {"x": CANCER.data, "y": pa.nulls(len(CANCER.data), pa.float64())}
    for of in ("class", "number"):
        with pytest.raises(DataError, match="no record of train has a 'y'"):
            learn(feature("select", "x", label="y", of=of, size=1), none)


PAIRS = pa.list_(pa.struct([("index", pa.int64()), ("value", pa.float64())]))
LISTS = pa.array(
    [[(0, 1.0), (3, 2.0)], None, [], [(9, 9.0)], [(1, 5.0), (2, 6.0)]],
    PAIRS,
)


def test_pairs_become_sparse_rows() -> None:
    made = feature("sparse", "x")
    learnt = learn(made, {"x": LISTS[:3]}, 2)
    assert learnt["width"] == 4
    for column in (LISTS[1:], LISTS.cast(pa.large_list(PAIRS.value_type))[1:]):
        found = made.encode({"x": column}, learnt)["out"]
        assert isinstance(found, Sparse)
        wanted = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 5, 6, 0]]
        assert dense(found).tolist() == wanted, "what train has not is left out"
    told = feature("sparse", "x", width=10)
    assert told.looks == 0
    assert encode(told, {"x": LISTS}, {}).sum() == 23


def test_columns_other_than_lists_of_pairs_are_refused() -> None:
    made = feature("sparse", "x")
    for kind in (pa.int8(), pa.list_(pa.int8()), pa.list_(pa.struct([("a", pa.int8())]))):
        with pytest.raises(DataError, match="must be lists of \\(index, value\\) pairs"):
            made.check({"x": kind})
    with pytest.raises(DataError, match="feature sparse: train has nothing but zeros"):
        learn(made, {"x": LISTS[1:3]})
