"""Summaries of numbers: exact where they are marked exact, close otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from echelon.data.inspect.sketches import BARS, SAMPLED, Figures, Numbers, record_keys


def figures(values: Any, piece: int = 5000) -> Figures:
    numbers, values = Numbers(), np.asarray(values)
    for start in range(0, len(values), piece):
        part = values[start : start + piece]
        numbers.add(part, record_keys(start, len(part)))
    found = numbers.figures()
    assert found is not None
    return found


def test_few_numbers_are_summed_up_exactly() -> None:
    values = np.random.default_rng(0).normal(3, 2, 20_001)
    found = figures(values)
    assert found.exact
    assert (found.count, found.min, found.max) == (20_001, values.min(), values.max())
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.std == pytest.approx(values.std(), rel=1e-12)
    assert found.quantiles[50] == np.median(values)
    assert found.quantiles[5] == np.sort(values)[1000]
    assert sum(found.histogram.counts) == 20_001
    assert found.as_data()["quantiles"]["p50"] == found.quantiles[50]


def test_many_numbers_have_exact_extremes_and_quantiles_of_a_sample() -> None:
    values = np.random.default_rng(0).exponential(1, 4 * SAMPLED)
    found = figures(values, 50_000)
    assert not found.exact
    assert found.sampled == SAMPLED
    assert (found.min, found.max, found.count) == (values.min(), values.max(), len(values))
    assert found.mean == pytest.approx(values.mean(), rel=1e-9)
    for share, value in found.quantiles.items():
        assert abs((values < value).mean() - share / 100) < 0.008  # four deviations
    assert figures(values, 7777).quantiles == found.quantiles


def test_what_is_not_finite_is_counted_apart() -> None:
    found = figures([1.0, np.inf, 3.0, -np.inf, 0.0])
    assert (found.count, found.infinite, found.zeros) == (3, 2, 1)
    assert (found.min, found.max) == (0, 3)
    empty = Numbers()
    assert empty.figures() is None
    empty.add(np.array([np.inf]), record_keys(0, 1))
    assert empty.figures() is None


def test_whole_numbers_have_bars_of_whole_width() -> None:
    few = figures(np.arange(1000) % 7).histogram
    assert few.edges == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]
    assert few.counts == [143] * 6 + [142]
    many = figures(np.arange(100)).histogram
    assert np.unique(np.diff(many.edges)).tolist() == [3.0]
    assert sum(many.counts) == 100
    assert len(many.counts) <= BARS


def test_a_few_far_ones_do_not_flatten_the_rest() -> None:
    values = np.concatenate([np.random.default_rng(0).normal(size=5000), [1e9, 2e9, -1e9]])
    shape = figures(values).histogram
    assert (shape.below, shape.above) == (1, 2) or shape.below + shape.above < 200
    assert shape.edges[-1] < 10
    assert sum(shape.counts) + shape.below + shape.above == 5003
    assert sum(count > 0 for count in shape.counts) > 20


@pytest.mark.parametrize("value", [0.0, -2.5, 3.25, 1e300, 2.0**60])
def test_numbers_that_are_all_alike_have_one_bar(value: float) -> None:
    found = figures([value] * 10)
    assert found.histogram.counts == [10]
    assert found.histogram.edges[0] < value < found.histogram.edges[1]
    assert found.min == found.max == found.quantiles[50] == value
