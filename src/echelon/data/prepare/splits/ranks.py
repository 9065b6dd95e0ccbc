"""A place for each record among those that have the same number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.core.hashing import key, words
from echelon.data.order import Order
from echelon.data.prepare.splits.part import Numbers

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
