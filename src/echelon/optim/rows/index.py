"""Ids → slots: a hash table that is searched for whole batches at a time.

    places:  ┌──┬──┬──┬──┬──┬──┐      0: nothing was ever here; 1: what was here is gone;
             │ 0│ 7│ 1│ 0│ 2│..│      else a slot, whose id is in `keys`
             └──┴──┴──┴──┴──┴──┘
An id is looked for at places h, h + d, h + 2d, …, both of them from its hash. A place takes four
bytes, and ids lie in the order of their slots, so there is nothing to move but places when the
table grows; and those move a few at a time, with every insertion. Until all have moved, what is
not found in the new places is looked for in the old ones.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.errors import TrainingError
from echelon.optim.rows.reserve import Column, zeros

Ids = NDArray[np.int64]
Places = NDArray[np.int32]

NONE, GONE, FIRST = 0, 1, 2
"""The slot of what is not there; the one that stands for what was removed; the first in use."""
_SMALLEST = 1 << 12
_FEW = 256
_AHEAD = np.arange(1, 9)
"""The last few ids look at several places at once: by then, a round costs more than its work."""
_MOVES = 8
"""Old places moved for each new id: all have, long before the new ones are full."""
_AT_LEAST = 1 << 13
_PLACE = Column(torch.int32)
_MULTIPLIERS = np.array(0x9E3779B97F4A7C15, np.uint64), np.array(0xD6E8FEB86659FD93, np.uint64)
_HALF, _QUARTER = np.uint64(32), np.uint64(16)
_ONE = np.uint64(1)


class Index:
    """Slots for distinct ids. The caller keeps what belongs to a slot, in arrays of its own."""

    def __init__(self, keys: Tensor) -> None:
        self._keys: Ids = keys.numpy()
        self._places = _empty(_SMALLEST)
        self._old: Places | None = None
        self._moved = self._until = 0
        self._used = 0
        """Places that are not 0, those of the removed among them."""
        self._free: list[Ids] = []
        self.high = FIRST
        """All slots in use are below this."""
        self.count = 0
        self.removals = 0
        """While this does not change, slots stay those of the ids they were found for."""

    def find(self, ids: Ids) -> Ids:
        """The slot of each id; 0 for one that is not there."""
        hashed = _hash(ids)
        slots = _look(self._places, self._keys, ids, hashed)[0]
        if self._old is not None and len(missing := np.flatnonzero(slots == NONE)):
            slots[missing] = _look(self._old, self._keys, ids[missing], hashed[missing])[0]
        return slots

    def insert(self, ids: Ids) -> Ids:
        """Slots for ids that are distinct, and not there yet."""
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
            if places is not None and len(slots):  # what has moved is in the old places, too
                here, at = _look(places, self._keys, ids, hashed)
                places[at[here != NONE]] = GONE
                found |= here
        assert np.array_equal(found, slots), "a slot is removed that is not in use"
        if len(slots):
            self._free.append(slots)
            self.count -= len(slots)
            self.removals += 1

    def settle(self) -> None:
        """Move whatever has to be moved."""
        while self._old is not None:
            self._move(1 << 20)

    def _take(self, count: int) -> Ids:
        """Free slots. While places move none is used again: it could be taken for what it was."""
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

    def _make_room(self, more: int) -> None:
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
        if self._free:  # some of these slots are nobody's
            own = _look(self._old, self._keys, ids, hashed)[0] == slots
            slots, hashed = slots[own], hashed[own]
        _put(self._places, hashed, slots)
        if self._moved == self._until:
            self._old = None


def next_part(at: int, count: int, high: int) -> tuple[int, int]:
    """The next so many slots of those below `high`, over and over; all of them if they are few."""
    start = at if at < high and high - FIRST > count else FIRST
    return start, min(start + count, high)


def _empty(size: int) -> Places:
    found: Places = zeros(size, _PLACE).numpy()
    return found


def _hash(ids: Ids) -> NDArray[np.uint64]:
    """Its upper half is good: every bit of it depends on all bits of the id.

    Without the first fold, multiples of 2**32 and the like would only be multiplied: what follows
    each other would lie in patterns, and some would be looked for at thousands of places.
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
    """An odd one comes by all places."""
    return ((hashed >> _QUARTER) | _ONE).view(np.int64)


def _look(places: Places, keys: Ids, ids: Ids, hashed: NDArray[np.uint64]) -> tuple[Ids, Ids]:
    """The slot of each id (0: not there) and the place that says so."""
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
        # Nothing is put behind a place that was never used.
        more = np.flatnonzero(~(several | (found == NONE)).any(1))
        left, near, ids, stride = left[more], ahead[more, -1], ids[more], stride[more]
    return slots, at


def _put(places: Places, hashed: NDArray[np.uint64], slots: Ids) -> None:
    """Where several want the same place one gets it, and the others go on to their next."""
    at, own = _first(hashed, len(places)), slots.astype(np.int32)
    stride: Ids | None = None
    while len(own):
        empty = np.flatnonzero(places.take(at) == NONE)
        places[at[empty]] = own[empty]
        lost = np.flatnonzero(places.take(at) != own)
        stride = _stride(hashed[lost]) if stride is None else stride[lost]
        own = own[lost]
        at = (at[lost] + stride) & (len(places) - 1)
