"""Features of numbers: standardise, min_max and bins, and their quantile sketches."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.preprocessing import KBinsDiscretizer, MinMaxScaler, StandardScaler

from echelon.core.errors import ConfigError, DataError
from echelon.data.prepare.features import quantiles
from echelon.data.prepare.steps import Columns, Ragged, Sparse

from .fitting import encode, feature, fit, learn, named, plain

CANCER = load_breast_cancer().data
GAPS = np.where(np.random.default_rng(0).random(CANCER.shape) < 0.1, np.nan, CANCER)
COLUMNS = named(GAPS)
NAMES = list(COLUMNS)


def test_standardised_as_by_scikit_learn() -> None:
    theirs = StandardScaler().fit_transform(GAPS)
    kept = fit(feature("standardise", NAMES, missing="keep"), COLUMNS)
    np.testing.assert_allclose(kept, theirs, rtol=1e-5, atol=1e-6)
    assert kept.dtype == np.float32
    ours = fit(feature("standardise", NAMES), COLUMNS)
    np.testing.assert_allclose(ours, np.nan_to_num(theirs), rtol=1e-5, atol=1e-6)


def test_far_from_zero_a_deviation_is_still_right() -> None:
    x = 1e9 + np.random.default_rng(0).normal(size=10_000)
    learnt = learn(feature("standardise", "c0"), named(x[:, None]), 333)
    np.testing.assert_allclose(learnt["std"], x.std(), rtol=1e-7)
    np.testing.assert_allclose(learnt["mean"], x.mean(), rtol=1e-15)


def test_ranged_as_by_scikit_learn() -> None:
    theirs = MinMaxScaler((-1, 2)).fit_transform(GAPS)
    ours = fit(feature("min_max", NAMES, low=-1, high=2, missing="keep"), COLUMNS)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_missing_value_is_the_mean_and_new_ones_may_be_cut() -> None:
    made = feature("min_max", "c0", clip=True)
    learnt = learn(made, {"c0": pa.array([0.0, 4.0, 2.0, 10.0])})
    new: Columns = {"c0": pa.array([None, 20.0, -5.0, float("inf"), float("nan")])}
    np.testing.assert_allclose(encode(made, new, learnt), [0.4, 1, 0, 0.4, 0.4])
    free = feature("min_max", "c0")
    np.testing.assert_allclose(encode(free, new, learnt)[1:3], [2, -0.5])


@pytest.mark.parametrize("shape", ["list", "tensor"])
def test_a_missing_vector_is_the_mean_of_each_number(shape: str) -> None:
    vectors = pa.array([[9, 9], [0, 2], None, [4, 6]], pa.list_(pa.int64(), 2))
    if shape == "tensor":
        kind = pa.fixed_shape_tensor(pa.int64(), [2])
        vectors = pa.ExtensionArray.from_storage(kind, vectors)
    made = feature("min_max", "c0")
    learnt = learn(made, {"c0": vectors[1:]})
    np.testing.assert_allclose(
        encode(made, {"c0": vectors[1:]}, learnt), [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    )
    np.testing.assert_allclose(encode(made, {"c0": vectors[2:3]}, learnt), [[0.5, 0.5]])


@pytest.mark.parametrize("kind", ["standardise", "min_max"])
def test_constant_columns_are_no_trouble(kind: str) -> None:
    made = feature(kind, "c0")
    learnt = learn(made, {"c0": pa.array([3, 3, 3])})
    assert encode(made, {"c0": pa.array([3, 5])}, learnt).tolist() == [0, 2]


def test_all_kinds_of_numbers() -> None:
    columns: Columns = {
        "flag": pa.array([True, False, None]),
        "day": pa.array([date(1970, 1, 1), date(1970, 1, 3), date(1970, 1, 2)]),
        "pair": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(6.0).reshape(3, 2)),
        "list": pa.array([[1.0], [2.0], [3.0]], pa.list_(pa.float64(), 1)),
        "made": np.array([[1, 2], [3, 4], [5, 6]], np.int8),
        "small": pa.array([1, 2, 3], pa.uint8()),
    }
    names = list(columns)
    found = fit(feature("min_max", names, missing="keep"), columns, 2)
    wanted: Any = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
        [np.nan, 0.5, 1, 1, 1, 1, 1, 1],
    ]
    np.testing.assert_allclose(found, wanted)
    assert fit(feature("min_max", "pair"), columns).shape == (3, 2)
    assert fit(feature("min_max", "small"), columns).shape == (3,)


def test_large_whole_numbers_are_rounded() -> None:
    stamps = pa.array([0, 1_700_000_000_123_456_789, None]).cast(pa.timestamp("ns"))
    columns: Columns = {"t": stamps, "n": pa.array([2**64 - 1, 0, 2**63], pa.uint64())}
    found = fit(feature("min_max", ["t", "n"], missing="keep"), columns)
    wanted: Any = [[0, 1], [1, 0], [np.nan, 0.5]]
    np.testing.assert_allclose(found, wanted)


@pytest.mark.parametrize("bins", [10, 40])
def test_bins_are_those_of_scikit_learn(bins: int) -> None:
    x = np.hstack([load_diabetes().data, CANCER[:442]])
    edges = np.quantile(x, np.linspace(0, 1, bins + 1), 0, method="averaged_inverted_cdf")
    x = x[:, (np.diff(edges, axis=0) > 1e-7).all(0)]  # others have bins that scikit-learn drops
    assert x.shape[1] > 20
    theirs = KBinsDiscretizer(bins, encode="ordinal", quantile_method="averaged_inverted_cdf")
    columns = named(x)
    ours = fit(feature("bins", list(columns), bins=bins), columns)
    assert ours.dtype == np.int64
    assert (ours == theirs.fit_transform(x)).all()


def test_bins_of_few_values_and_of_missing_ones() -> None:
    made = feature("bins", "c0", bins=4)
    columns: Columns = {"c0": pa.array([0.0] * 90 + [1.0] * 10 + [None])}
    learnt = learn(made, columns)
    assert np.unique(encode(made, columns, learnt)).tolist() == [0, 4], "0 to 1 is the only bin"
    spread = learn(made, {"c0": pa.array(range(100))})
    new: Columns = {"c0": pa.array([-1000, 0, 30, 60, 99, 1000])}
    assert encode(made, new, spread).tolist() == [0, 0, 1, 2, 3, 3]
    assert made.different(spread) == 5


@given(
    values=st.lists(st.integers(-30, 30), min_size=1, max_size=200),
    bins=st.sampled_from([2, 4, 8, 16]),  # parts that a float holds exactly
)
@settings(max_examples=15)
def test_quantiles_are_numpys(values: list[int], bins: int) -> None:
    at = np.linspace(0, 1, bins + 1)
    ours = quantiles.quantiles(quantiles.summarise(np.array(values, float)), at)
    theirs = np.quantile(values, at, method="averaged_inverted_cdf")
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("span", [4, 32, 256])
def test_ranks_of_a_long_stream_are_within_the_bound(
    span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantiles, "SIZE", 64)
    monkeypatch.setattr(quantiles, "SPAN", span)
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.lognormal(k / 10, 2, 1000) for k in range(60)])
    (summary,) = quantiles.sketches(
        quantiles.partial([x[i : i + 1000]]) for i in range(0, 60_000, 1000)
    )
    at = np.linspace(0, 1, 1001)
    ranks = np.searchsorted(np.sort(x), quantiles.quantiles(summary, at)) / len(x)
    steps = 1 + int(np.ceil(np.log(60) / np.log(span)))
    assert abs(ranks - at).max() <= steps / (2 * 64) + 1e-4
    assert quantiles.quantiles(summary, np.array([0.0, 1.0])).tolist() == [x.min(), x.max()]
    assert summary.counts.sum() == len(x)


@pytest.mark.parametrize("kind", ["standardise", "min_max", "bins"])
def test_empty_blocks_are_no_trouble(kind: str) -> None:
    made = feature(kind, NAMES)
    empty: Any = {name: column[:0] for name, column in COLUMNS.items()}
    partials = [made.look(0, block, {}) for block in (empty, COLUMNS, empty)]
    learnt = made.learn(0, partials, {}, None)  # type: ignore[arg-type]
    assert plain(learnt) == plain(learn(made, COLUMNS, 10_000))
    assert len(made.encode(empty, learnt)["out"]) == 0


@pytest.mark.parametrize("kind", ["standardise", "min_max", "bins"])
def test_a_column_without_numbers_is_refused(kind: str) -> None:
    columns: Columns = {"a": pa.array([1.0, 2.0]), "b": pa.array([None, None], pa.float64())}
    with pytest.raises(DataError, match=r"'?b'?.*no number in any record of train"):
        learn(feature(kind, ["a", "b"]), columns)
    with pytest.raises(DataError, match="no number in any record of train"):
        feature(kind, "a").learn(0, [], {}, None)  # type: ignore[arg-type]


def test_wrong_columns_are_refused_before_anything_is_read() -> None:
    made = feature("standardise", "c0")
    with pytest.raises(DataError, match="feature standardise: column 'c0' is of type string"):
        made.check({"c0": pa.string()})
    with pytest.raises(DataError, match="column 'c0' is of type month_day_nano_interval"):
        made.check({"c0": pa.month_day_nano_interval()})
    with pytest.raises(DataError, match="column 'c0' is unknown"):
        made.check({"c1": pa.float64()})
    with pytest.raises(DataError, match="made of a, b: say with `to`"):
        feature("bins", ["a", "b"], to="").check({"a": pa.int8(), "b": pa.int8()})
    with pytest.raises(ConfigError, match="low = 1 must be below high = 1"):
        feature("min_max", "a", low=1)


def test_unfit_columns_of_earlier_features_are_refused_when_they_are_seen() -> None:
    made = feature("standardise", "c0")
    offsets = np.array([0, 1])
    for values, message in (
        (Ragged(np.ones(1), offsets), "is of rows of any length"),
        (Sparse(np.zeros(1, int), np.ones(1), offsets, 3), "is sparse"),
        (np.array(["a"]), "is of <U1, not numbers"),
        (pa.array(["a"]), "is of type string: not numbers"),
    ):
        with pytest.raises(DataError, match=message):
            made.look(0, {"c0": values}, {})
