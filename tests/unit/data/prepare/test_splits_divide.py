"""Dividing records among train, valid and test: ratio, stratified, group, time."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import DataError
from echelon.data.prepare import ranking
from echelon.data.prepare.ranking import Table, apportion, smallest, sortable
from echelon.data.prepare.splits import By

from .dividing import divide

SHARES = (0.8, 0.1, 0.1)


def sizes(splits: Any) -> list[int]:
    return [int(np.sum(splits == code)) for code in range(3)]


@given(rows=st.integers(10, 5000), seed=st.integers(0, 2**70))
@settings(max_examples=30)
def test_a_ratio_is_met_within_one_record(rows: int, seed: int) -> None:
    found = sizes(divide("ratio", SHARES, rows, seed))
    assert sum(found) == rows
    assert all(abs(n - rows * share) < 1 for n, share in zip(found, SHARES, strict=True))


def test_the_seed_decides_and_nothing_else() -> None:
    keys = np.arange(20_000) % 7
    first = divide("stratified", SHARES, len(keys), 1, keys)
    other = divide("stratified", SHARES, len(keys), 2, keys)
    assert 0.25 < (first != other).mean() < 0.42  # of two draws independent of each other: 0.34
    assert (divide("stratified", SHARES, len(keys), 1, keys, size=1 << 15) == first).all()


def test_records_of_a_split_come_from_everywhere() -> None:
    test = np.flatnonzero(divide("ratio", SHARES, 100_000, 0) == 2)
    counts = np.histogram(test, 20, (0, 100_000))[0]
    assert abs(counts - 500).max() < 100  # 4.6 deviations


@given(
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=60),
    parts=st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)),
)
@settings(max_examples=50)
def test_every_class_is_divided_within_one_record(
    counts: list[int], parts: tuple[int, int, int]
) -> None:
    found = apportion(np.array(counts), parts)
    exact = np.array(counts)[:, None] * np.array(parts) / sum(parts)
    assert (found.sum(1) == counts).all()
    assert (abs(found - exact) < 1 + 1e-6).all()
    assert (found[np.array(counts) > 0, 0] >= 1).all()


def test_many_small_classes_do_not_all_favour_the_same_split() -> None:
    found = apportion(np.full(1000, 3), SHARES)
    assert abs(found.sum(0) - np.array([2400, 300, 300])).max() <= 1


def test_stratified_by_hashed_keys() -> None:
    classes = np.repeat(np.array([1 << 63, 5, 77], np.uint64), [900, 90, 10])
    mixed = np.random.default_rng(0).permutation(classes)
    splits = divide("stratified", SHARES, 1000, 3, mixed)
    assert sizes(splits) == [800, 100, 100]
    assert sizes(splits[mixed == 77]) == [8, 1, 1]


def test_a_class_of_one_record_is_trained_on() -> None:
    classes = np.array([*[0] * 99, 1])
    for seed in range(20):
        assert divide("stratified", SHARES, 100, seed, classes)[-1] == 0


@given(seed=st.integers(0, 1000), groups=st.integers(3, 300))
@settings(max_examples=30)
def test_a_group_is_in_one_split(seed: int, groups: int) -> None:
    keys = np.random.default_rng(seed).zipf(1.5, 2000) % groups
    if len(np.unique(keys)) < 3:
        return
    splits = divide("group", SHARES, len(keys), seed, keys)
    for key in np.unique(keys):
        assert len(np.unique(splits[keys == key])) == 1
    assert min(sizes(splits)) > 0


def test_groups_of_like_size_meet_the_shares() -> None:
    keys = np.arange(10_000) % 500
    found = sizes(divide("group", SHARES, len(keys), 0, keys))
    assert abs(np.array(found) - [8000, 1000, 1000]).max() <= 20


def test_records_with_a_split_of_their_own_keep_it() -> None:
    own = np.where(np.arange(1000) < 200, 2, -1).astype(np.int8)
    splits = divide("ratio", (0.9, 0.1, 0), 1000, 0, given=own)
    assert (splits[:200] == 2).all()
    assert sizes(splits[200:]) == [720, 80, 0]
    assert (own[200:] == -1).all(), "what was given is not written to"


def test_a_group_follows_those_of_its_records_that_have_a_split() -> None:
    keys = np.arange(1000) % 50
    own = np.full(1000, -1, np.int8)
    own[7] = 2
    splits = divide("group", (0.5, 0.5, 0), 1000, 0, keys, own)
    assert (splits[keys == 7] == 2).all()
    assert (splits[keys != 7] < 2).all()


def test_a_group_given_to_two_splits_is_refused() -> None:
    own = np.full(1000, -1, np.int8)
    own[[7, 57]] = [0, 2]
    for size in (40, 1000):
        with pytest.raises(DataError, match=r"group of record (7|57) into several splits"):
            divide("group", SHARES, 1000, 0, np.arange(1000) % 50, own, size)


def test_the_latest_records_are_for_the_test() -> None:
    times = np.random.default_rng(0).permutation(1000) + 0.5
    splits = divide("time", SHARES, 1000, 0, times)
    assert sizes(splits) == [800, 100, 100]
    assert times[splits == 0].max() < times[splits == 1].min()
    assert times[splits == 1].max() < times[splits == 2].min()


def test_records_of_the_same_time_stay_together() -> None:
    days = np.arange(1000) // 70
    splits = divide("time", SHARES, 1000, 0, days)
    for day in np.unique(days):
        assert len(np.unique(splits[days == day])) == 1
    assert (np.diff(splits) >= 0).all()


@pytest.mark.parametrize("shares", [(0, 0.5, 0.5), (0.5, 0, 0.5), (0, 0, 1.0), (1.0, 0, 0)])
def test_a_split_without_a_share_gets_nothing(shares: tuple[float, ...]) -> None:
    for by in get_args(By):
        found = sizes(divide(by, shares, 100, 0, None if by == "ratio" else np.arange(100) % 40))
        assert [n > 0 for n in found] == [share > 0 for share in shares]


def test_a_record_without_time_is_refused() -> None:
    with pytest.raises(DataError, match="record 3 has no time"):
        divide("time", SHARES, 10, 0, np.array([1, 2, 3, np.nan, *range(6)]))


def test_a_split_that_would_be_empty_is_refused() -> None:
    with pytest.raises(DataError, match=r"split by time: valid is to have 0.1 of the records"):
        divide("time", SHARES, 10, 0, np.zeros(10))
    with pytest.raises(DataError, match=r"split by group: valid is to have 0.1"):
        divide("group", SHARES, 10, 0, np.zeros(10, np.int64))


@given(
    numbers=st.one_of(
        st.lists(st.floats(allow_nan=False), min_size=1).map(np.array),
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1).map(lambda n: np.array(n, np.int64)),
        st.lists(st.integers(0, 2**64 - 1), min_size=1).map(lambda n: np.array(n, np.uint64)),
    )
)
@settings(max_examples=30)
def test_the_nth_smallest_is_that_of_sorted_numbers(numbers: Any) -> None:
    words = sortable(numbers)
    ranks = [0, len(numbers) // 2, len(numbers) - 1]
    found = smallest(lambda: (words[low : low + 7] for low in range(0, len(words), 7)), ranks)
    assert found.tolist() == sortable(np.sort(numbers))[ranks].tolist()


def test_a_table_of_keys_is_put_together_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "_OFTEN", 1000)
    keys = np.random.default_rng(0).integers(0, 6000, 20_000)
    table = Table.of(np.split(keys, 20))
    found, counts = np.unique(keys, return_counts=True)
    assert (table.keys == found).all()
    assert (table.sizes == counts).all()
    assert (table.keys[table.numbers(keys[:1000])] == keys[:1000]).all()
