"""Fewer points that draw the same curve."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.track.report.charts import downsample, smoothed


@given(
    st.lists(st.floats(width=32), min_size=1, max_size=600), st.integers(min_value=10, max_value=80)
)
def test_the_limit_holds_and_ends_and_extremes_stay(values: list[float], limit: int) -> None:
    kept = downsample(values, limit)
    assert len(kept) <= max(limit, 1)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1]) == (0, len(values) - 1)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        chosen = [values[i] for i in kept if math.isfinite(values[i])]
        assert (min(chosen), max(chosen)) == (min(finite), max(finite))
    if len(finite) < len(values):
        assert any(not math.isfinite(values[i]) for i in kept)


def test_a_short_series_is_kept_whole() -> None:
    assert downsample([1.0, 2.0, 3.0], 10) == [0, 1, 2]


def test_a_single_spike_in_a_million_is_seen() -> None:
    values = [0.0] * 1_000_000
    values[123_456] = 9.0
    kept = downsample(values)
    assert 123_456 in kept
    assert len(kept) <= 1000


def test_the_average_is_true_from_the_first_point_and_skips_gaps() -> None:
    found = smoothed([4.0, 4.0, math.nan, 4.0], window=10)
    assert found[:2] == pytest.approx([4.0, 4.0])
    assert math.isnan(found[2])
    assert found[3] == pytest.approx(4.0)


def test_a_window_of_one_changes_nothing() -> None:
    assert smoothed([1.0, 5.0, 2.0], window=1) == [1.0, 5.0, 2.0]
