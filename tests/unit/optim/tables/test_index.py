"""Ids find their slots after insertions and removals, and while the table grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import TrainingError
from echelon.optim.tables.index import FIRST, Ids, Index, _first, _hash, _stride

INT64 = np.iinfo(np.int64)


def index(room: int = 1 << 17) -> Index:
    return Index(torch.zeros(room, dtype=torch.int64))


def distinct(count: int, seed: int = 0) -> Ids:
    drawn = np.random.default_rng(seed).integers(INT64.min, INT64.max, count)
    return np.unique(drawn)


def test_any_number_is_an_id() -> None:
    odd = np.array([0, 1, -1, 2, INT64.min, INT64.max, 1 << 40])
    found = index()
    assert found.find(odd).tolist() == [0] * 7
    slots = found.insert(odd)
    assert sorted(slots.tolist()) == list(range(FIRST, FIRST + 7))
    assert np.array_equal(found.find(odd), slots)
    assert found.find(np.array([3, -2])).tolist() == [0, 0]


def test_nothing_is_lost_while_it_grows() -> None:
    ids, found = distinct(60_000), index()
    slots = np.empty_like(ids)
    grew = 0
    for start in range(0, len(ids), 1000):
        part = slice(start, start + 1000)
        slots[part] = found.insert(ids[part])
        grew += found._old is not None
        known = slice(0, start + 1000)
        assert np.array_equal(found.find(ids[known]), slots[known])
        assert not found.find(ids[start + 1000 :]).any()
    assert grew, "places moved a few at a time"
    assert found.count == len(ids)


def test_what_is_removed_while_places_move_stays_away() -> None:
    ids, found = distinct(40_000), index()
    slots, known = found.insert(ids[:14_000]), 14_000
    while found._old is None:
        slots = np.concatenate([slots, found.insert(ids[known : known + 100])])
        known += 100
    found.remove(slots[:1500])  # these have moved, those have not
    found.remove(slots[-1500:])
    again = found.insert(ids[:10])
    for _ in range(2):
        assert np.array_equal(found.find(ids[:10]), again)
        assert not found.find(ids[10:1500]).any()
        assert np.array_equal(found.find(ids[1500 : known - 1500]), slots[1500:-1500])
        assert not found.find(ids[known - 1500 :]).any()
        found.settle()


def test_slots_of_removed_ids_are_used_again() -> None:
    ids, found = distinct(3000), index(3002)
    for _ in range(5):
        slots = found.insert(ids)
        found.remove(slots)
    assert found.high <= 3002
    assert found.count == 0


def test_many_removed_ids_do_not_fill_it_up() -> None:
    found = index(5000)
    for seed in range(60):
        slots = found.insert(distinct(1000, seed))
        found.settle()
        found.remove(slots)
    assert len(found._places) <= 1 << 13


def test_a_full_table_says_so() -> None:
    with pytest.raises(TrainingError, match="a table of rows is full"):
        index(10).insert(distinct(9))


def looks(found: Index, ids: Ids) -> list[int]:
    """How many ids are found at their first place, their second, …"""
    slots, hashed, counts = found.find(ids), _hash(ids), []
    at, stride = _first(hashed, len(found._places)), _stride(hashed)
    while len(slots):
        elsewhere = found._places[at] != slots
        counts.append(len(slots) - int(elsewhere.sum()))
        slots, stride, at = slots[elsewhere], stride[elsewhere], at[elsewhere]
        at = (at + stride) & (len(found._places) - 1)
    return counts


COUNT = 60_000
REGULAR = {
    **{f"n << {shift}": np.arange(COUNT) << shift for shift in (0, 1, 10, 20, 31, 32, 33, 35, 47)},
    **{f"3n << {shift}": 3 * np.arange(COUNT) << shift for shift in (30, 36, 37, 38, 39, 45)},
    **{f"-n << {shift}": -np.arange(COUNT) << shift for shift in (0, 16, 32, 38, 39, 47)},
    "n and ~n": np.concatenate([np.arange(COUNT // 2), ~np.arange(COUNT // 2)]),
    "a field and a number": (np.arange(30)[:, None] << 48 | np.arange(2000)).ravel(),
    "two halves": (np.arange(240)[:, None] << 32 | np.arange(250)).ravel(),
    "1000n": 1000 * np.arange(COUNT),
    "bits of floats": np.arange(1.0, COUNT).view(np.int64),
}


@pytest.mark.parametrize("name", REGULAR)
def test_ids_that_follow_a_pattern_are_found_as_soon_as_any(name: str) -> None:
    """As with ids by chance: nearly nine of ten at the first place, none after many."""
    found = index()
    found.insert(REGULAR[name])
    found.settle()
    counts = looks(found, REGULAR[name])
    assert counts[0] > 0.85 * len(REGULAR[name])
    assert len(counts) < 25


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sets(st.integers(-40, 40), min_size=1)),
        max_size=30,
    )
)
def test_does_what_a_dictionary_does(moves: list[tuple[bool, set[int]]]) -> None:
    found, known = index(), dict[int, int]()
    everything = np.arange(-41, 42)
    for add, chosen in moves:
        ids = np.array([n for n in sorted(chosen) if (n in known) != add])
        if add:
            slots = found.insert(ids.astype(np.int64))
            known.update(zip(ids.tolist(), slots.tolist(), strict=True))
        else:
            found.remove(np.array([known.pop(n) for n in ids.tolist()], np.int64))
        assert found.find(everything).tolist() == [known.get(n, 0) for n in everything.tolist()]
        assert found.count == len(known)
        assert len(set(known.values())) == len(known)
