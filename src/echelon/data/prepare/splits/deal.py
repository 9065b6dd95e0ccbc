"""Which shard and which place in it a record gets: every shard is a small likeness of its split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.hashing import key
from echelon.data.order import Order
from echelon.data.prepare.splits.ranks import Dealing, Keys, alike, chunks, numbered

_TAG = 0xDEA1
_CELLS = 1 << 12
_MOST_BINS = 1 << 8
_SAMPLE = 1 << 16


class Dealt(NamedTuple):
    """For each record its shard, numbered within its split, and its row in that shard."""

    shard: NDArray[np.int32]
    place: NDArray[np.int64]


def shard_counts(
    sizes: Sequence[int], shards: int | None = None, rows: int | None = None
) -> list[int]:
    """How many shards each split gets: `shards`, or as many as hold `rows` each; none is empty."""
    assert (shards is None) != (rows is None), "say how many shards, or how many rows in each"
    if shards is not None:
        return [min(shards, size) for size in sizes]
    assert rows is not None
    return [-(-size // rows) for size in sizes]


def deal(
    splits: NDArray[np.int8],
    shards: Sequence[int],
    seed: int,
    classes: Keys | None = None,
    lengths: Keys | None = None,
) -> Dealt:
    """Deal each split's records out to its shards like cards, sorted by class and then length.

    So shards of a split differ by at most one record, and by at most one record in each class.
    Lengths rise through one class and fall through the next: what the last shard is ahead in one
    it is behind in the other, and sums of lengths stay alike. Records alike in both are shuffled
    first, and all records of a shard in the end, by `seed`.
    """
    cells = _Cells(splits, len(shards), classes, lengths)
    sizes = np.zeros(cells.count, np.int64)
    for part in chunks(len(splits)):
        sizes += np.bincount(cells.of(part), minlength=cells.count)
    per_split = sizes.reshape(len(shards), -1).sum(1)
    _enough(per_split, shards)
    # A split's cells are one after the other: its cards are numbered from 0.
    first = sizes.cumsum() - sizes
    first -= np.repeat(per_split.cumsum() - per_split, cells.count // len(shards))
    dealing = Dealing(cells.count, seed, _TAG)
    shard, place = np.empty(len(splits), np.int32), np.empty(len(splits), np.int64)
    for part in chunks(len(splits)):
        cell = cells.of(part)
        cards = first[cell] + dealing.next(cell)
        hands = np.maximum(np.asarray(shards), 1)[splits[part]]
        shard[part], place[part] = cards % hands, cards // hands
    _shuffle(splits, shards, per_split, seed, shard, place)
    return Dealt(shard, place)


class _Cells:
    """One number per record for split, class and length, in the order they are dealt in."""

    def __init__(
        self, splits: NDArray[np.int8], count: int, classes: Keys | None, lengths: Keys | None
    ) -> None:
        self._splits = splits
        self._lengths = lengths
        self._classes: NDArray[np.int32] | None = None
        self._kinds = 1
        if classes is not None:
            self._classes, self._kinds = numbered(classes)
        self._bounds: NDArray[Any] = np.empty(0)
        if lengths is not None:
            bins = max(1, _CELLS // (max(self._kinds, 1) * count))
            self._bounds = _bounds(lengths, min(_MOST_BINS, bins))
        self._bins = len(self._bounds) + 1
        self.count = count * self._kinds * self._bins

    def of(self, part: slice) -> NDArray[np.int64]:
        cells = self._splits[part] * np.int64(self._kinds)
        if self._classes is not None:
            cells += self._classes[part]
        if self._lengths is None:
            return cells
        size = np.searchsorted(self._bounds, self._lengths[part], "right")
        return cells * self._bins + np.where(cells % 2, self._bins - 1 - size, size)


def _bounds(lengths: Keys, bins: int) -> NDArray[Any]:
    """Lengths that cut the records into parts of about equal sums, by a sample of fixed places.

    So there are most bounds where records are long: there a difference counts.
    """
    sample = np.sort(lengths[:: max(1, len(lengths) // _SAMPLE)])
    sums = sample.cumsum(dtype=np.float64)
    if not len(sums):
        return sample
    at = np.searchsorted(sums, np.arange(1, bins) / bins * sums[-1])
    return np.unique(sample[at])


def _enough(per_split: NDArray[Any], shards: Sequence[int]) -> None:
    for size, count in zip(per_split.tolist(), shards, strict=True):
        if size and not 1 <= count <= size:
            raise DataError(f"{size} records cannot be dealt out to {count} shards")


def _shuffle(
    splits: NDArray[np.int8],
    shards: Sequence[int],
    per_split: NDArray[Any],
    seed: int,
    shard: NDArray[np.int32],
    place: NDArray[np.int64],
) -> None:
    """Cards lie in their hand as they were dealt, sorted by class: mix every hand."""
    starts = np.cumsum(shards) - shards
    orders = [
        Order(key(_TAG, seed, split), number, (size - number + count - 1) // count)
        for split, (size, count) in enumerate(zip(per_split.tolist(), shards, strict=True))
        for number in range(count)
    ]
    for part in chunks(len(splits)):
        hands, places, at, _ = alike(starts[splits[part]] + shard[part])
        for hand, rows in zip(hands.tolist(), np.split(places, at[1:]), strict=True):
            place[part][rows] = orders[hand].at(place[part][rows])
