"""Counting, ranking and selecting records of a stream, without sorting or holding them.

    Table       the different keys of all records, and how many records have each
    Ranks       a random rank for each record among those of equal key
    Dealing     the next free number for each record among those of its cell
    smallest    the k-th smallest of very many numbers, exactly
    apportion   how many records of each class each split gets

Records come as parts: a few bytes of each, all that dividing them needs. All records together are
`Parts`, a function that begins a new pass over them, so what is held grows with the keys, not with
the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.hashing import key, words
from echelon.data.order import Order

Keys: TypeAlias = NDArray[Any]
"""A number per record: a class, a group or a time, or a hash of it."""
Codes: TypeAlias = NDArray[np.int8]
Numbers: TypeAlias = NDArray[np.int64]
SPLITS = ("train", "valid", "test")
TRAIN, TEST = 0, 2
"""Indices into SPLITS."""
FREE = -1
"""Stands for the split of a record that is yet to be divided."""


class Part(NamedTuple):
    """Consecutive records: the numbers of each that the plan is made from."""

    split: Codes
    """Index into SPLITS; FREE if the record is yet to be divided."""
    key: Keys | None = None
    """The class, group or time to divide by."""
    kind: Keys | None = None
    """The class by which shards and weights are balanced."""
    length: Keys | None = None

    def train_kinds(self) -> Keys:
        """Return the classes of the train records."""
        assert self.kind is not None, "balanced by a class"
        return np.asarray(self.kind[self.split == TRAIN])

    def repeated(self, times: NDArray[np.int32]) -> Part:
        """Return the part with record i repeated times[i] times."""
        given = (None if values is None else np.repeat(values, times) for values in self)
        return Part(*given)  # type: ignore[arg-type]


Parts: TypeAlias = Callable[[], Iterable[Part]]
"""Begins a new pass over all records, in order. Never hold all of them."""


def class_key(part: Part) -> Keys:
    """Return the class of each record; without classes, all are of the same one."""
    return np.zeros(len(part.split), np.int8) if part.key is None else part.key


def given_key(part: Part) -> Keys:
    """Return the group or the time of each record."""
    assert part.key is not None, "groups and times are keys"
    return part.key


# Counting keys


@dataclass(frozen=True, slots=True)
class Table:
    """The different keys, sorted, and how many records have each; a key's number is its index."""

    keys: Keys
    sizes: Numbers

    @classmethod
    def of(cls, parts: Iterable[Keys]) -> Table:
        """Count the keys of all records; memory grows with the different keys alone."""
        found: list[tuple[Keys, Numbers]] = []
        pending = 0
        for part in parts:
            found.append(_counted(part))
            pending += len(found[-1][0])
            if pending > max(_OFTEN, 2 * len(found[0][0])):
                found = [_together(found)]
                pending = len(found[0][0])
        return cls(*_together(found)) if found else cls(np.empty(0), np.empty(0, np.int64))

    def numbers(self, keys: Keys) -> Numbers:
        """Return the number of each key. For a key that is not in the table it is arbitrary."""
        return np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))


_OFTEN = 1 << 20
"""Counts of parts are merged when they have more keys than this."""


def _counted(part: Keys) -> tuple[Keys, Numbers]:
    """Count by hashing, which is faster than sorting."""
    counts = pc.value_counts(pa.array(part))
    return counts.field("values").to_numpy(), counts.field("counts").to_numpy()


def _together(found: list[tuple[Keys, Numbers]]) -> tuple[Keys, Numbers]:
    keys, inverse = np.unique(np.concatenate([keys for keys, _ in found]), return_inverse=True)
    sizes = np.zeros(len(keys), np.int64)
    np.add.at(sizes, inverse, np.concatenate([counts for _, counts in found]))
    return keys, sizes


# Ranking records among those of equal number


class Ranks:
    """Shuffles the records of equal number among themselves, part by part.

    Record k of the n records of a number gets place `order(k)` of a keyed permutation of n. So
    nothing is sorted, and only a count per number is kept.
    """

    def __init__(self, sizes: Numbers, seed: int, tag: int) -> None:
        self._sizes = sizes
        self._key = key(tag, seed)
        self._seen = np.zeros_like(sizes)

    def next(self, codes: Numbers) -> Numbers:
        """Return the places of the next records; parts must come in order."""
        out = np.empty(len(codes), np.int64)
        for chunk in chunks(len(codes)):
            self._fill(codes[chunk], out[chunk])
        return out

    def _fill(self, codes: Numbers, out: Numbers) -> None:
        numbers, places, starts, counts = alike(codes)
        spans = zip(numbers.tolist(), starts.tolist(), counts.tolist(), strict=True)
        for number, start, count in spans:
            seen = int(self._seen[number])
            shuffled = Order(self._key, number, int(self._sizes[number]))
            out[places[start : start + count]] = shuffled.rows(seen, seen + count)
        self._seen[numbers] += counts


class Dealing:
    """Numbers the records of each cell 0, 1, 2, … as they come, shuffled within their chunk.

    Faster than `Ranks` if there are many cells: one sort handles all of them. Records far apart in
    the input stay far apart, as dealing wants; the shuffle only breaks periodic patterns.
    """

    def __init__(self, cells: int, seed: int, tag: int) -> None:
        self._seen = np.zeros(cells, np.int64)
        self._passed = 0
        self._key = key(tag, seed)

    def next(self, cells: Numbers) -> Numbers:
        """Return the numbers of the next records; parts must come in order."""
        out = np.empty(len(cells), np.int64)
        for chunk in chunks(len(cells)):
            self._fill(cells[chunk], out[chunk])
        return out

    def _fill(self, cells: Numbers, out: Numbers) -> None:
        records = np.arange(self._passed, self._passed + len(cells), dtype=np.uint64)
        self._passed += len(cells)
        lots = (words(records, self._key) >> _DROPPED).view(np.int64)
        numbers, places, starts, counts = alike(cells, lots)
        out[places] = np.repeat(self._seen[numbers] - starts, counts) + _PLACES[: len(cells)]
        self._seen[numbers] += counts


class Alike(NamedTuple):
    """The records of a chunk grouped by number.

    Those of `numbers[i]` are at `places[starts[i]:starts[i] + counts[i]]` of the chunk.
    """

    numbers: Numbers
    places: Numbers
    starts: Numbers
    counts: Numbers


def alike(codes: NDArray[Any], lots: Numbers | None = None) -> Alike:
    """Group the records of a chunk by number, within a number sorted by lot, then by place."""
    assert len(codes) <= CHUNK
    if lots is None and len(codes) and codes.min() == codes.max():
        return Alike(codes[:1], _PLACES[: len(codes)], _PLACES[:1], np.array([len(codes)]))
    # One word holds number, lot and place: numpy sorts words several times as fast as it argsorts.
    packed = codes.astype(np.int64) << (_PLACE_BITS + _LOT_BITS)
    if lots is not None:
        packed |= lots << _PLACE_BITS
    packed |= _PLACES[: len(codes)]
    packed.sort()
    places = packed & (CHUNK - 1)
    packed >>= _PLACE_BITS + _LOT_BITS
    starts = np.flatnonzero(np.diff(packed, prepend=-1))
    return Alike(packed[starts], places, starts, np.diff(starts, append=len(packed)))


def chunks(rows: int) -> Iterator[slice]:
    """Yield slices of CHUNK rows that cover all rows."""
    for start in range(0, rows, CHUNK):
        yield slice(start, min(start + CHUNK, rows))


CHUNK = 1 << 18
"""Records at a time; their places take _PLACE_BITS."""
_PLACE_BITS, _LOT_BITS = 18, 16
_DROPPED = np.uint64(64 - _LOT_BITS)
_PLACES = np.arange(CHUNK)


# Selecting order statistics


def smallest(words: Callable[[], Iterable[Words]], ranks: Sequence[int]) -> Words:
    """Return the words of these ranks (from 0) in sorted order.

    Makes four passes over the words; each finds 16 more bits of the results by counting.
    """
    found = np.zeros(len(ranks), np.uint64)
    left = list(ranks)
    for shift in range(64 - _BITS, -1, -_BITS):
        counts = np.zeros((len(ranks), 1 << _BITS), np.int64)
        for part in words():
            digits = part >> np.uint64(shift)
            for at, known in enumerate(found):
                same = digits[digits >> np.uint64(_BITS) == known]
                low = (same & np.uint64((1 << _BITS) - 1)).astype(np.int64)
                counts[at] += np.bincount(low, minlength=1 << _BITS)
        for at, ends in enumerate(counts.cumsum(1)):
            digit = int(np.searchsorted(ends, left[at], "right"))
            left[at] -= int(ends[digit - 1]) if digit else 0
            found[at] = found[at] << np.uint64(_BITS) | np.uint64(digit)
    return found


def sortable(numbers: Keys) -> Words:
    """Return 64-bit words in the same order as the numbers."""
    if numbers.dtype.kind == "u":
        return numbers.astype(np.uint64)
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64).view(np.uint64) ^ _TOP
    # + 0.0 turns −0.0 into 0.0. The bits of positive floats ascend, those of negative ones descend.
    bits = (numbers.astype(np.float64) + 0.0).view(np.uint64)
    return np.where(bits & _TOP, ~bits, bits | _TOP)


Words = NDArray[np.uint64]
_BITS = 16
_TOP = np.uint64(1 << 63)


# Dividing whole numbers by shares


def apportion(sizes: NDArray[np.int64], shares: Sequence[float]) -> NDArray[np.int64]:
    """Return how many records of each class [C] each split gets: int64 [C, splits].

    Every class is divided within one record of its shares. Records left over by rounding down go to
    the split that has fallen behind most in total, so many small classes do not all favor the same
    one. Every class has at least one record in the first split, if that has a share.
    """
    exact = sizes[:, None] * np.asarray(shares, np.float64) / sum(shares)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    parts = exact - counts
    spare = sizes - counts.sum(1)
    lack = np.zeros(len(shares))
    for number in np.flatnonzero(spare):
        lack += parts[number]
        # A share that divides evenly gets no more: it would be a whole record off.
        order = np.argsort(-np.where(parts[number] > 1e-9, lack, -np.inf), kind="stable")
        chosen = order[: spare[number]]
        counts[number, chosen] += 1
        lack[chosen] -= 1
    if shares[0] > 0:
        _at_least_one(counts, exact)
    return counts


def _at_least_one(counts: NDArray[np.int64], exact: NDArray[np.float64]) -> None:
    absent = np.flatnonzero((counts[:, 0] == 0) & (exact[:, 0] > 0))
    # Take it from the split that was rounded up most: all stay within one record of their shares.
    giver = (counts[absent] - exact[absent]).argmax(1)
    counts[absent, giver] -= 1
    counts[absent, 0] += 1
