"""Axes of charts: every value is on them, and their ticks are round numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.core.html import Scale, step_scale, value_scale

_FLOATS = st.floats(min_value=-1e99, max_value=1e99)


@given(st.lists(_FLOATS, min_size=1, max_size=20), st.booleans(), st.booleans())
def test_every_value_and_every_tick_is_on_the_axis(
    values: list[float], may_be_log: bool, from_zero: bool
) -> None:
    scale = value_scale(values, may_be_log=may_be_log, from_zero=from_zero)
    assert scale.low < scale.high
    assert all(-1e-9 <= scale.place(value) <= 1 + 1e-9 for value in values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 13
    assert all(-1e-6 <= place <= 1 + 1e-6 for place, _ in ticks)


def test_ticks_are_round_and_told_apart() -> None:
    assert [label for _, label in Scale(0, 1).ticks()] == ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    labels = [label for _, label in Scale(0, 0.001).ticks()]
    assert labels == ["0", "2e-4", "4e-4", "6e-4", "8e-4", "1e-3"]
    assert [label for _, label in Scale(0, 50_000).ticks()][-1] == "50k"


def test_values_that_span_decades_get_a_logarithmic_axis() -> None:
    scale = value_scale([0.01, 2.0], may_be_log=True)
    assert scale.log
    assert [label for _, label in scale.ticks()][:3] == ["0.01", "0.02", "0.05"]
    assert scale.place(math.sqrt(scale.low * scale.high)) == pytest.approx(0.5)
    wide = value_scale([1e-8, 1.0], may_be_log=True)
    assert 4 <= len(wide.ticks()) <= 9


@pytest.mark.parametrize("values", [[0.0, 2.0], [-1.0, 100.0], [1.0, 2.0]])
def test_values_that_do_not_stay_linear(values: list[float]) -> None:
    assert not value_scale(values, may_be_log=True).log


def test_an_accuracy_does_not_exceed_one() -> None:
    assert value_scale([0.5, 0.999], top=1.0).high == 1.0


def test_a_rate_starts_at_zero() -> None:
    assert value_scale([900.0, 1000.0], from_zero=True).low == 0.0


def test_steps_are_whole_numbers() -> None:
    assert [label for _, label in step_scale(1).ticks()] == ["0", "1"]
    assert [label for _, label in step_scale(0).ticks()] == ["0", "1"]
    assert [label for _, label in step_scale(450).ticks()] == ["0", "100", "200", "300", "400"]
