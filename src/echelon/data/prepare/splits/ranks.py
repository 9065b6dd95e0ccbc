"""Keys as small numbers, and a place for each record among those that have the same number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.hashing import key, words
from echelon.data.order import Order

Keys: TypeAlias = NDArray[Any]
"""A number per record: a class, a group, a time, or a hash of one."""

CHUNK = 1 << 18
"""Records at a time."""
_PLACE_BITS, _LOT_BITS = 18, 16
_DROPPED = np.uint64(64 - _LOT_BITS)
_PLACES = np.arange(CHUNK)


def chunks(rows: int) -> Iterator[slice]:
    """All records, a part at a time."""
    for start in range(0, rows, CHUNK):
        yield slice(start, min(start + CHUNK, rows))


def numbered(keys: Keys) -> tuple[NDArray[np.int32], int]:
    """0 for the first key that occurs, 1 for the next other one, …; and how many there are."""
    coded = pa.array(keys).dictionary_encode()
    # Without nulls this is a view of Arrow's own memory.
    return coded.indices.to_numpy(), len(coded.dictionary)


class Alike(NamedTuple):
    """Which numbers occur in a chunk, and the places of their records, one number's after the
    other's: those of `numbers[i]` are `places[starts[i]:starts[i] + counts[i]]`."""

    numbers: NDArray[np.int64]
    places: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]


def alike(codes: NDArray[Any], lots: NDArray[np.int64] | None = None) -> Alike:
    """Records of a chunk by number, then by lot, then as they come."""
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


class Ranks:
    """Shuffles the records of each number among themselves, chunk after chunk.

    Record k of n alike is given place `order(k)` of a keyed permutation of n: nothing is sorted,
    and nothing is kept but how many of each number have passed.
    """

    def __init__(self, sizes: NDArray[np.int64], seed: int, tag: int) -> None:
        self._sizes = sizes
        self._seed = seed
        self._tag = tag
        self._seen = np.zeros_like(sizes)

    def next(self, codes: NDArray[Any]) -> NDArray[np.int64]:
        """The places of the records after those that have been asked for already."""
        numbers, places, starts, counts = alike(codes)
        out = np.empty(len(codes), np.int64)
        spans = zip(numbers.tolist(), starts.tolist(), counts.tolist(), strict=True)
        for number, start, count in spans:
            seen = int(self._seen[number])
            shuffled = Order(key(self._tag, self._seed), number, int(self._sizes[number]))
            out[places[start : start + count]] = shuffled.rows(seen, seen + count)
        self._seen[numbers] += counts
        return out


class Dealing:
    """Numbers the records of each cell 0, 1, 2, … as they come, mixed within their chunk.

    Quicker than `Ranks` where cells are many: one sort for all of them. Records that lie far apart
    stay so, which is what dealing them out wants; only the regular step is taken out of it.
    """

    def __init__(self, cells: int, seed: int, tag: int) -> None:
        self._seen = np.zeros(cells, np.int64)
        self._passed = 0
        self._key = key(tag, seed)

    def next(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of the records after those that have been asked for already."""
        records = np.arange(self._passed, self._passed + len(cells), dtype=np.uint64)
        self._passed += len(cells)
        lots = (words(records, self._key) >> _DROPPED).view(np.int64)
        numbers, places, starts, counts = alike(cells, lots)
        out = np.empty(len(cells), np.int64)
        out[places] = np.repeat(self._seen[numbers] - starts, counts) + _PLACES[: len(cells)]
        self._seen[numbers] += counts
        return out
