"""Rank, count and select records without sorting them."""

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

# --- part ---
# Some records, one after the other: a few bytes of each, all that dividing them needs.

Keys: TypeAlias = NDArray[Any]
"""A number per record: a class, a group, a time, or a hash of one."""
Codes: TypeAlias = NDArray[np.int8]
Numbers: TypeAlias = NDArray[np.int64]

SPLITS = ("train", "valid", "test")
TRAIN, TEST = 0, 2
FREE = -1


class Part(NamedTuple):
    """Records that follow one another."""

    split: Codes
    """The number of each one's split in SPLITS; FREE: it is to be divided."""
    key: Keys | None = None
    """The class, group or time that they are divided by."""
    kind: Keys | None = None
    """The class that shards and weights are to be balanced by."""
    length: Keys | None = None

    def train_kinds(self) -> Keys:
        assert self.kind is not None, "balanced by a class"
        return np.asarray(self.kind[self.split == TRAIN])

    def repeated(self, times: NDArray[np.int32]) -> Part:
        """Each record so many times."""
        given = (None if values is None else np.repeat(values, times) for values in self)
        return Part(*given)  # type: ignore[arg-type]


def class_key(part: Part) -> Keys:
    """The class of each record; where there are none, all are of one."""
    return np.zeros(len(part.split), np.int8) if part.key is None else part.key


def given_key(part: Part) -> Keys:
    """The group or the time of each record."""
    assert part.key is not None, "groups and times are keys"
    return part.key


Parts: TypeAlias = Callable[[], Iterable[Part]]
"""All records from the first on, as often as they are asked for: they are gone through several
times, and never held together."""


# --- table ---
# The different keys of all records, and how many records have each.

_OFTEN = 1 << 20


@dataclass(frozen=True, slots=True)
class Table:
    """Sorted keys; a key's number is its place among them."""

    keys: Keys
    sizes: Numbers

    @classmethod
    def of(cls, parts: Iterable[Keys]) -> Table:
        """Of all records; what is held grows with the different keys alone."""
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
        """The number of each record's key; of one that is not there, that of another."""
        return np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))


def _counted(part: Keys) -> tuple[Keys, Numbers]:
    """By hashing, which is quicker than sorting."""
    counts = pc.value_counts(pa.array(part))
    return counts.field("values").to_numpy(), counts.field("counts").to_numpy()


def _together(found: list[tuple[Keys, Numbers]]) -> tuple[Keys, Numbers]:
    keys, inverse = np.unique(np.concatenate([keys for keys, _ in found]), return_inverse=True)
    sizes = np.zeros(len(keys), np.int64)
    np.add.at(sizes, inverse, np.concatenate([counts for _, counts in found]))
    return keys, sizes


# --- ranks ---
# A place for each record among those that have the same number.

CHUNK = 1 << 18
"""Records at a time."""
_PLACE_BITS, _LOT_BITS = 18, 16
_DROPPED = np.uint64(64 - _LOT_BITS)
_PLACES = np.arange(CHUNK)


class Alike(NamedTuple):
    """Which numbers occur in a chunk, and the places of their records, one number's after the
    other's: those of `numbers[i]` are `places[starts[i]:starts[i] + counts[i]]`."""

    numbers: Numbers
    places: Numbers
    starts: Numbers
    counts: Numbers


def alike(codes: NDArray[Any], lots: Numbers | None = None) -> Alike:
    """Records of a chunk by number, then by lot, then as they come."""
    assert len(codes) <= CHUNK
    if lots is None and len(codes) and codes.min() == codes.max():
        return Alike(codes[:1], _PLACES[: len(codes)], _PLACES[:1], np.array([len(codes)]))
    # One word for all of it: numpy sorts words several times as fast as it finds an order.
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
    """All rows, a part at a time."""
    for start in range(0, rows, CHUNK):
        yield slice(start, min(start + CHUNK, rows))


class Ranks:
    """Shuffles the records of each number among themselves, some at a time.

    Record k of n alike is given place `order(k)` of a keyed permutation of n: nothing is sorted,
    and nothing is kept but how many of each number have passed.
    """

    def __init__(self, sizes: Numbers, seed: int, tag: int) -> None:
        self._sizes = sizes
        self._key = key(tag, seed)
        self._seen = np.zeros_like(sizes)

    def next(self, codes: Numbers) -> Numbers:
        """The places of the records after those that have been asked for already."""
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
    """Numbers the records of each cell 0, 1, 2, … as they come, mixed within their chunk.

    Quicker than `Ranks` where cells are many: one sort for all of them. Records that lie far apart
    stay so, which is what dealing them out wants; only the regular step is taken out of it.
    """

    def __init__(self, cells: int, seed: int, tag: int) -> None:
        self._seen = np.zeros(cells, np.int64)
        self._passed = 0
        self._key = key(tag, seed)

    def next(self, cells: Numbers) -> Numbers:
        """The numbers of the records after those that have been asked for already."""
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


# --- nth ---
# The n-th smallest of very many numbers, exactly, without sorting or holding them.

Words = NDArray[np.uint64]
_BITS = 16
_TOP = np.uint64(1 << 63)


def sortable(numbers: Keys) -> Words:
    """Words in the same order as the numbers."""
    if numbers.dtype.kind == "u":
        return numbers.astype(np.uint64)
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64).view(np.uint64) ^ _TOP
    # + 0.0 makes one zero of two. Greater floats have greater bits, but negative ones the reverse.
    bits = (numbers.astype(np.float64) + 0.0).view(np.uint64)
    return np.where(bits & _TOP, ~bits, bits | _TOP)


def smallest(words: Callable[[], Iterable[Words]], ranks: Sequence[int]) -> Words:
    """Those of these ranks, from 0; goes through the words four times, 16 bits at a time."""
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


# --- apportion ---
# Shares of whole numbers, so that neither a class nor the sum of all is far off.


def apportion(sizes: NDArray[np.int64], shares: Sequence[float]) -> NDArray[np.int64]:
    """How many records of each class [C] each split gets: int64 [C, splits].

    A class is divided within one record of its shares. What is left over by rounding down goes to
    the split that lacks most in sum so far, so that many small classes do not all favour the same
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
    # From whoever was rounded up: so all stay within one record of their shares.
    giver = (counts[absent] - exact[absent]).argmax(1)
    counts[absent, giver] -= 1
    counts[absent, 0] += 1
