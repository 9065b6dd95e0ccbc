"""A hash table from ids to slots, searched for whole batches at a time; and admission of new ids.

    places:  ┌──┬──┬──┬──┬──┬──┐      0: never used; 1: its id was removed;
             │ 0│ 7│ 1│ 0│ 2│..│      else a slot, whose id is in `keys`
             └──┴──┴──┴──┴──┴──┘
An id is looked for at places h, h + d, h + 2d, …, where h and d come from its hash. A place takes
four bytes, and ids lie in the order of their slots, so only places have to move when the table
grows. They move a few at a time, with every insertion. Until all have moved, an id that is not
found in the new places is looked for in the old ones.

`Waiting` counts ids that may get a row later. `reserve` makes the arrays of a table, which grow
without being copied.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.errors import TrainingError

Ids = NDArray[np.int64]
Places = NDArray[np.int32]


class Column(NamedTuple):
    """An array with numbers for each slot."""

    dtype: torch.dtype
    width: int | None = None
    """Numbers for each slot; None: one, and the array has one dimension."""

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * (1 if self.width is None else self.width)


NONE, GONE, FIRST = 0, 1, 2
"""The slot of an id that is not there; the one that marks a removed id; the first that is used."""
_SMALLEST = 1 << 12
"""Places of a new table."""
_FEW = 256
_AHEAD = np.arange(1, 9)
"""The last `_FEW` ids of a search look at eight places at once: with so few, a round of NumPy calls
costs more than its work."""
_MOVES = 8
"""Old places moved for each new id: all have moved long before the new places are full."""
_AT_LEAST = 1 << 13
"""Old places moved at an insertion, at least."""
_PLACE = Column(torch.int32)
_MULTIPLIERS = np.array(0x9E3779B97F4A7C15, np.uint64), np.array(0xD6E8FEB86659FD93, np.uint64)
_HALF, _QUARTER = np.uint64(32), np.uint64(16)
_ONE = np.uint64(1)


class Index:
    """Slots for distinct ids. The caller keeps the data of a slot, in arrays of its own."""

    def __init__(self, keys: Tensor) -> None:
        self._keys: Ids = keys.numpy()
        self._places = _empty(_SMALLEST)
        self._old: Places | None = None
        self._moved = self._until = 0
        self._used = 0
        """Places that are not 0, including those of removed ids."""
        self._free: list[Ids] = []
        self.high = FIRST
        """All slots in use are below this."""
        self.count = 0
        self.removals = 0
        """Counts calls that removed ids. While it does not change, found slots stay valid."""

    def find(self, ids: Ids) -> Ids:
        """Return the slot of each id; NONE for one that is not there."""
        hashed = _hash(ids)
        slots = _look(self._places, self._keys, ids, hashed)[0]
        if self._old is not None and len(missing := np.flatnonzero(slots == NONE)):
            slots[missing] = _look(self._old, self._keys, ids[missing], hashed[missing])[0]
        return slots

    def insert(self, ids: Ids) -> Ids:
        """Return new slots for ids that are distinct, and not there yet."""
        self._make_room(len(ids))
        slots = self._take(len(ids))
        self._keys[slots] = ids
        _put(self._places, _hash(ids), slots)
        self._used += len(ids)
        self.count += len(ids)
        return slots

    def remove(self, slots: Ids) -> None:
        """Forget the ids at these slots, which are in use."""
        ids = self._keys[slots]
        hashed = _hash(ids)
        found = np.zeros_like(slots)
        for places in (self._places, self._old):
            if places is not None and len(slots):  # ids that have moved are in the old places, too
                here, at = _look(places, self._keys, ids, hashed)
                places[at[here != NONE]] = GONE
                found |= here
        assert np.array_equal(found, slots), "a slot is removed that is not in use"
        if len(slots):
            self._free.append(slots)
            self.count -= len(slots)
            self.removals += 1

    def settle(self) -> None:
        """Move all places that have to move."""
        while self._old is not None:
            self._move(1 << 20)

    def _make_room(self, more: int) -> None:
        """Go on moving places, or begin to, so that `more` ids fit."""
        if self._old is not None:
            self._move(max(_AT_LEAST, _MOVES * more))
        if 2 * (self._used + more) <= len(self._places):
            return
        self.settle()
        self._old, self._moved, self._until = self._places, FIRST, self.high
        # Half of the places are free in the end; a quarter of them is taken right after moving.
        self._places = _empty(1 << (4 * (self.count + more) - 1).bit_length())
        self._used = self.count
        self._move(max(_AT_LEAST, _MOVES * more))

    def _move(self, count: int) -> None:
        assert self._old is not None
        slots = np.arange(self._moved, min(self._moved + count, self._until))
        self._moved += len(slots)
        ids = self._keys[self._moved - len(slots) : self._moved]
        hashed = _hash(ids)
        if self._free:  # some of these slots are not in use
            own = _look(self._old, self._keys, ids, hashed)[0] == slots
            slots, hashed = slots[own], hashed[own]
        _put(self._places, hashed, slots)
        if self._moved == self._until:
            self._old = None

    def _take(self, count: int) -> Ids:
        """Allocate slots. While places move, freed slots are not reused, because a lookup may
        still find the old id there."""
        taken: list[Ids] = []
        while count and self._free and self._old is None:
            last = self._free.pop()
            taken.append(last[:count])
            if len(last) > count:
                self._free.append(last[count:])
            count -= len(taken[-1])
        if self.high + count > len(self._keys):
            raise TrainingError(f"a table of rows is full: it has {self.count:,} of them")
        taken.append(np.arange(self.high, self.high + count))
        self.high += count
        return np.concatenate(taken)


def _empty(size: int) -> Places:
    found: Places = zeros(size, _PLACE).numpy()
    return found


def _look(places: Places, keys: Ids, ids: Ids, hashed: NDArray[np.uint64]) -> tuple[Ids, Ids]:
    """Return the slot of each id (NONE: not there), and the place where it was found."""
    at = _first(hashed, len(places))
    slots: Ids = places.take(at).astype(np.int64)
    missed = keys.take(slots) != ids
    missed |= slots == GONE
    left = np.flatnonzero(missed)
    others = slots[left] != NONE
    slots[left] = NONE
    left = left[others]
    near, ids, stride = at[left], ids[left], _stride(hashed[left])
    while len(left) > _FEW:
        near = (near + stride) & (len(places) - 1)
        found = places.take(near)
        hit = keys.take(found) == ids
        hit &= found != GONE
        here = left[hit]
        slots[here], at[here] = found[hit], near[hit]
        more = np.flatnonzero((found != NONE) & ~hit)
        left, near, ids, stride = left[more], near[more], ids[more], stride[more]
    while len(left):
        ahead = (near[:, None] + stride[:, None] * _AHEAD) & (len(places) - 1)
        found = places.take(ahead)
        several = keys.take(found) == ids[:, None]
        several &= found > GONE
        row, column = np.nonzero(several)
        slots[left[row]], at[left[row]] = found[row, column], ahead[row, column]
        # An id is never put behind a place that was never used.
        more = np.flatnonzero(~(several | (found == NONE)).any(1))
        left, near, ids, stride = left[more], ahead[more, -1], ids[more], stride[more]
    return slots, at


def _put(places: Places, hashed: NDArray[np.uint64], slots: Ids) -> None:
    """Write slots to the first free place of each hash. If several want the same place, one gets
    it, and the others go on to their next."""
    at, own = _first(hashed, len(places)), slots.astype(np.int32)
    stride: Ids | None = None
    while len(own):
        empty = np.flatnonzero(places.take(at) == NONE)
        places[at[empty]] = own[empty]
        lost = np.flatnonzero(places.take(at) != own)
        stride = _stride(hashed[lost]) if stride is None else stride[lost]
        own = own[lost]
        at = (at[lost] + stride) & (len(places) - 1)


def _hash(ids: Ids) -> NDArray[np.uint64]:
    """Return a hash of each id, whose upper half is good: each of its bits depends on the whole id.

    Without the first fold, multiples of 2**32 and the like would only be multiplied: neighbors
    would lie in patterns, and some ids would be looked for at thousands of places.
    """
    whole = ids.view(np.uint64)
    hashed = whole >> _HALF
    hashed ^= whole
    hashed *= _MULTIPLIERS[0]
    hashed ^= hashed >> _HALF
    hashed *= _MULTIPLIERS[1]
    return hashed


def _first(hashed: NDArray[np.uint64], size: int) -> Ids:
    return (hashed >> np.uint64(65 - size.bit_length())).view(np.int64)


def _stride(hashed: NDArray[np.uint64]) -> Ids:
    """Return d for each hash. It is odd, so the search visits all places."""
    return ((hashed >> _QUARTER) | _ONE).view(np.int64)


def next_part(at: int, count: int, high: int) -> tuple[int, int]:
    """Return the next `count` slots below `high` as (start, stop), over and over from the first;
    all of them if they are few."""
    start = at if at < high and high - FIRST > count else FIRST
    return start, min(start + count, high)


# Admission

_COLUMNS = {
    "ids": Column(torch.int64),
    "counts": Column(torch.int32),
    "seen": Column(torch.int32),
}


class Waiting:
    """Ids without a row yet. An id is admitted once it has come `admit` times, without a gap of
    more than `expire` updates.

    The counts are exact: which id is admitted when must not depend on the number of servers that
    share a table, as it would with a sketch whose cells several ids share.
    """

    def __init__(self, admit: int, expire: int | None) -> None:
        memory = reserve(_COLUMNS)
        self._index = Index(memory["ids"])
        self._memory = memory
        self._counts: NDArray[np.int32] = memory["counts"].numpy()
        self._seen: NDArray[np.int32] = memory["seen"].numpy()
        self._admit, self._expire = admit, expire
        self._swept = FIRST

    def __len__(self) -> int:
        return self._index.count

    @property
    def high(self) -> int:
        """All slots in use are below this."""
        return self._index.high

    def admit(self, ids: Ids, counts: Ids, version: int) -> NDArray[np.bool_]:
        """Count these distinct ids, and return which of them are admitted. Those no longer wait."""
        slots = self._index.find(ids)
        before = self._counts[slots].astype(np.int64)
        if self._expire is not None:
            before[self._seen[slots] < version - self._expire] = 0
        now = before + counts
        ready: NDArray[np.bool_] = now >= self._admit
        gone = slots[ready & (slots != NONE)]
        self._forget(gone)
        fresh = ~ready & (slots == NONE)
        slots[fresh] = self._index.insert(ids[fresh])
        self._counts[slots[~ready]] = now[~ready]
        self._seen[slots[~ready]] = version
        return ready

    def sweep(self, version: int, count: int) -> None:
        """Forget ids that came too long ago, among the next `count` slots."""
        assert self._expire is not None
        start, stop = next_part(self._swept, count, self._index.high)
        old = self._seen[start:stop] < version - self._expire
        old &= self._counts[start:stop] > 0
        self._forget(start + np.flatnonzero(old))
        self._swept = stop

    def _forget(self, slots: Ids) -> None:
        self._index.remove(slots)
        self._counts[slots] = 0

    def state(self) -> dict[str, Tensor]:
        return self.part(FIRST, self.high)

    def part(self, low: int, high: int) -> dict[str, Tensor]:
        """Return the part of the state in these slots."""
        used = slice(low, min(high, self.high))
        there = self._memory["counts"][used] > 0
        return {f"waiting_{name}": column[used][there] for name, column in self._memory.items()}

    def load(self, state: dict[str, Any]) -> None:
        ids = state["waiting_ids"].numpy()
        slots = self._index.insert(ids)
        self._counts[slots] = state["waiting_counts"].numpy()
        self._seen[slots] = state["waiting_seen"].numpy()


# Columns that grow without being copied
#
# Addresses are reserved for more slots than will ever be used, and the system gives memory to them
# page by page when they are first written. So nothing has to move when a table grows, and a table
# is always one array to gather from.

MOST = (1 << 31) - 2
"""Slots are 32-bit numbers."""
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python names it from 3.13 on
_FIRST = 1 << 21
"""Bytes at the start with ordinary pages: a small table should not take several huge ones."""


def reserve(columns: Mapping[str, Column]) -> dict[str, Tensor]:
    """Return columns of zeros for as many slots as this machine could ever hold."""
    each = sum(column.nbytes for column in columns.values())
    slots = min(MOST, 2 * _physical() // each)
    while True:
        try:
            return {name: zeros(slots, column) for name, column in columns.items()}
        except OSError as error:  # a limit on addresses (ulimit -v), or strict accounting
            if slots < 1 << 16:
                raise TrainingError(f"no memory for a table of rows: {error}") from None
            slots //= 2


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def zeros(slots: int, column: Column) -> Tensor:
    """Return a column of zeros for so many slots. It takes memory only as it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, slots * column.nbytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) > 2 * _FIRST:
        # Rows are gathered from all over: with small pages the page tables cost more than the data.
        memory.madvise(mmap.MADV_HUGEPAGE, _FIRST)
    whole = torch.frombuffer(memory, dtype=column.dtype, count=slots * (column.width or 1))
    return whole if column.width is None else whole.view(slots, column.width)
