"""`Intervals` behaves like a set of integers and stores few intervals."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.data.intervals import Intervals

LIMIT = 40
spans = (
    st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT))
    .map(sorted)
    .filter(lambda pair: pair[0] < pair[1])
)


def numbers(intervals: Intervals) -> set[int]:
    return {number for start, stop in intervals for number in range(start, stop)}


def assert_sound(intervals: Intervals, expected: set[int]) -> None:
    pairs = list(intervals)
    assert numbers(intervals) == expected
    assert intervals.total == len(expected)
    assert bool(intervals) == bool(expected)
    assert all(start < stop for start, stop in pairs)
    assert all(left[1] < right[0] for left, right in pairwise(pairs))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take", "pop"]), spans), max_size=30))
def test_it_is_a_set(steps: list[tuple[str, list[int]]]) -> None:
    intervals, expected = Intervals(), set[int]()
    for name, (start, stop) in steps:
        span = set(range(start, stop))
        assert intervals.overlap(start, stop) == len(span & expected)
        assert numbers(Intervals(intervals.common(start, stop))) == span & expected
        if name == "add":
            intervals.add(start, stop)
            expected |= span
        elif name == "remove":
            intervals.remove(start, stop)
            expected -= span
        elif name == "take":
            assert intervals.take(start, stop) == (span <= expected)
            expected -= span if span <= expected else set()
        elif expected:
            first, last = intervals.pop(stop - start)
            assert first == min(expected)
            assert 0 < last - first <= stop - start
            expected -= set(range(first, last))
        assert_sound(intervals, expected)


def test_neighbours_become_one() -> None:
    intervals = Intervals((start, start + 32) for start in range(0, 3200, 32))
    assert list(intervals) == [(0, 3200)]
    assert intervals == Intervals([(0, 3200)])
    assert intervals != Intervals([(0, 3199)])
    assert repr(intervals) == "Intervals([(0, 3200)])"


def test_clear_leaves_nothing() -> None:
    intervals = Intervals([(0, 3), (5, 8)])
    intervals.clear()
    assert not intervals
    with pytest.raises(IndexError):
        intervals.pop(1)
