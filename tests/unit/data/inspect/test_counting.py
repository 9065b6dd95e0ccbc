"""Distinct counts are exact for few values and close for many; samples are even and repeatable."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from echelon.data.inspect.sketches import COUNTED, KEPT, Distinct, Sample, record_keys


def counted(values: pa.Array, piece: int = 10_000) -> Distinct:
    distinct = Distinct(values.type)
    for start in range(0, len(values), piece):
        distinct.add(values.slice(start, piece))
    return distinct


def test_few_values_are_counted_one_by_one() -> None:
    distinct = counted(pa.array(["a", "b", "a", "c"] * 20_000))
    assert distinct.count() == (3, True)
    assert distinct.counts == {"a": 40_000, "b": 20_000, "c": 20_000}


@pytest.mark.parametrize("piece", [100, 10_000, 1_000_000])
def test_more_than_can_be_counted_are_still_known_exactly_while_their_hashes_fit(
    piece: int,
) -> None:
    values = np.random.default_rng(0).permutation(np.repeat(np.arange(COUNTED + 500), 3))
    distinct = counted(pa.array(values), piece)
    assert distinct.counts is None
    assert distinct.count() == (COUNTED + 500, True)


@pytest.mark.parametrize("kind", ["int", "float", "text"])
def test_many_values_are_estimated_within_a_few_per_cent(kind: str) -> None:
    numbers = np.random.default_rng(1).integers(0, 10**9, 100_000)
    true = len(np.unique(numbers))
    twice = np.tile(numbers, 2)
    column = pa.array([f"u{n}" for n in twice] if kind == "text" else twice)
    if kind == "float":
        column = column.cast(pa.float64())
    found = counted(column).count()
    assert not found.exact
    assert abs(found.value - true) < 4 * true / np.sqrt(KEPT)
    assert counted(column, 33_333).count() == found


def test_long_texts_are_told_apart_without_being_kept() -> None:
    values = pa.array([f"{n}" + "x" * 10_000 for n in range(1000)] * 3, pa.large_utf8())
    few = counted(values, 500)
    assert few.count() == (1000, True)
    assert few.counts is not None
    more = pa.array([f"{n}" + "x" * 10_000 for n in range(2000)], pa.large_utf8())
    assert counted(more, 500).counts is None
    assert counted(more, 500).count() == (2000, True)


def test_a_small_stream_is_its_own_sample() -> None:
    sample = Sample(10)
    for first in range(0, 8, 3):
        sample.add(record_keys(first, 3), np.arange(first, first + 3))
    assert sample.values().tolist() == list(range(9))
    assert Sample(3).values() is None


def test_a_sample_is_even_in_order_and_the_same_however_the_stream_is_cut() -> None:
    def taken(piece: int) -> list[int]:
        sample = Sample(500)
        for first in range(0, 50_000, piece):
            keys = record_keys(first, piece)
            rows = sample.chosen(keys)
            sample.add(keys[rows], first + rows)
        found: list[int] = sample.values().tolist()
        return found

    found = taken(1000)
    assert len(found) == 500
    assert found == sorted(found) == taken(50_000) == taken(10)
    quarters = np.bincount(np.array(found) // 12_500)
    assert quarters.min() > 90  # 125 each, give or take 10
