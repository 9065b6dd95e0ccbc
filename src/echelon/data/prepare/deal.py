"""Shard, place, copies and weight of every record, given its split.

    Deal     deals records out to shards like cards, sorted by class and length, so that every shard
             has the same mixture
    Mixing   shuffles each shard: place dealt → place written. It needs only the sizes, so workers
             apply it while they encode
    Weights, Copies   balance the classes of train, by a weight or by writing records repeatedly

The keys of all records stream past, several times, and only counts are kept, so memory does not
grow with the records. The same records and seed give the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.hashing import key
from echelon.data.order import Order
from echelon.data.prepare.ranking import (
    TRAIN,
    Codes,
    Dealing,
    Keys,
    Numbers,
    Part,
    Parts,
    Ranks,
    Table,
    alike,
    chunks,
)

_DEAL_TAG = 0xDEA1
"""Distinguishes these random numbers from others of the same seed."""


def shard_counts(
    sizes: Sequence[int], shards: int | None = None, rows: int | None = None
) -> list[int]:
    """Return the number of shards of each split: `shards`, or as many as `rows` per shard take.

    No shard is empty.
    """
    assert (shards is None) != (rows is None), "say how many shards, or how many rows in each"
    if shards is not None:
        return [min(shards, size) for size in sizes]
    assert rows is not None
    return [-(-size // rows) for size in sizes]


class Deal:
    """Deals each split's records out to its shards like cards, sorted by class and then by length.

    Shards of a split differ by at most one record, in total and in each class. Lengths rise through
    one class and fall through the next: the last shard is ahead in one and behind in the other, so
    sums of lengths stay close. Records of equal class and length are shuffled before, by `seed`.
    The order within a shard is not final; see `Mixing`.
    """

    def __init__(
        self, sizes: Sequence[int], shards: Sequence[int], seed: int, parts: Parts
    ) -> None:
        """`sizes` and `shards`: records and shards of each split. No record may be FREE."""
        for size, count in zip(sizes, shards, strict=True):
            if size and not 1 <= count <= size:
                raise DataError(f"{size} records cannot be dealt out to {count} shards")
        self._cells = _Cells(sizes, parts)
        filled = np.zeros(self._cells.count, np.int64)
        for part in parts():
            filled += np.bincount(self._cells.of(part), minlength=self._cells.count)
        # A split's cells are consecutive; its cards are numbered from 0.
        before = np.cumsum(sizes) - sizes
        self._first = filled.cumsum() - filled
        self._first -= np.repeat(before, self._cells.count // len(shards))
        self._dealing = Dealing(self._cells.count, seed, _DEAL_TAG)
        self._hands = np.maximum(np.array(shards), 1)

    def next(self, part: Part) -> Dealt:
        """Deal the next records; parts must come in order."""
        cells = self._cells.of(part)
        cards = self._first[cells] + self._dealing.next(cells)
        hands = self._hands[part.split]
        return Dealt((cards % hands).astype(np.int32), cards // hands)


class Dealt(NamedTuple):
    """The shard of each record, numbered within its split, and the place in that shard."""

    shard: NDArray[np.int32]
    place: Numbers


class _Cells:
    """Numbers the combinations of split, class and length bin in the order of dealing."""

    def __init__(self, sizes: Sequence[int], parts: Parts) -> None:
        self._table = Table.of(_kinds(part) for part in parts())
        self._kinds = max(len(self._table.keys), 1)
        bins = max(1, _CELLS // (self._kinds * len(sizes)))
        self._bounds = _bounds(_sample(parts, sum(sizes)), min(_MOST_BINS, bins))
        self._bins = len(self._bounds) + 1
        self.count = len(sizes) * self._kinds * self._bins

    def of(self, part: Part) -> Numbers:
        cells = part.split * np.int64(self._kinds) + self._table.numbers(_kinds(part))
        if part.length is None:
            return cells
        size = np.searchsorted(self._bounds, part.length, "right")
        return cells * self._bins + np.where(cells % 2, self._bins - 1 - size, size)


_CELLS = 1 << 12
"""About how many cells there are; more only if there are more classes."""
_MOST_BINS = 1 << 8
_SAMPLE = 1 << 16
"""About how many lengths the bounds of the bins are computed from."""


def _kinds(part: Part) -> Keys:
    return np.zeros(len(part.split), np.int8) if part.kind is None else part.kind


def _sample(parts: Parts, count: int) -> Keys:
    """Return the lengths of evenly spaced records."""
    step = max(1, count // _SAMPLE)
    found: list[Keys] = []
    passed = 0
    for part in parts():
        if part.length is not None:
            found.append(part.length[-passed % step :: step].copy())  # a view would keep the part
        passed += len(part.split)
    return np.concatenate(found) if found else np.empty(0)


def _bounds(sample: Keys, bins: int) -> Keys:
    """Return lengths that cut the records into bins of about equal sums of lengths.

    Bins are narrow where records are long, because there a difference matters most.
    """
    if not len(sample):
        return sample
    sample = np.sort(sample)
    sums = sample.cumsum(dtype=np.float64)
    at = np.searchsorted(sums, np.arange(1, bins) / bins * sums[-1])
    return np.unique(sample[at])


# The final order within a shard


class Mixing:
    """Shuffles every shard; `Deal` leaves its records sorted by class.

    `sizes` and `shards` are the records and shards of each split.
    """

    def __init__(self, sizes: Sequence[int], shards: Sequence[int], seed: int) -> None:
        hands = np.maximum(np.array(shards), 1)
        self._hand_of = np.cumsum(hands) - hands
        self._orders = list(_orders(sizes, hands.tolist(), seed))

    def places(self, split: Codes, shard: NDArray[np.int32], place: Numbers) -> Numbers:
        """Return the final places in their shards of records that were dealt."""
        out = np.empty_like(place)
        for chunk in chunks(len(place)):
            hands = self._hand_of[split[chunk]] + shard[chunk]
            self._mix(hands, place[chunk], out[chunk])
        return out

    def _mix(self, hands: Numbers, place: Numbers, out: Numbers) -> None:
        found, rows, at, _ = alike(hands)
        for hand, chosen in zip(found.tolist(), np.split(rows, at[1:]), strict=True):
            order = self._orders[hand]
            assert order is not None, "a hand with cards"
            out[chosen] = order.at(place[chosen])


def _orders(sizes: Sequence[int], hands: Sequence[int], seed: int) -> Iterator[Order | None]:
    """Yield the permutation of each shard; None for one without records."""
    for split, (size, count) in enumerate(zip(sizes, hands, strict=True)):
        for number in range(count):
            cards = (size - number + count - 1) // count
            yield Order(key(_DEAL_TAG, seed, split), number, cards) if cards else None


# Class balance, by weight or by copies


def train_classes(parts: Parts) -> Table:
    """Return the classes of the train records, with their sizes."""
    return Table.of(part.train_kinds() for part in parts())


class Weights:
    """Weights records ÷ (classes · records of the class), counted over train; their mean is 1.

    In valid and test every record weighs 1, because a model is judged on the data as they are.
    """

    def __init__(self, classes: Table) -> None:
        self._classes = classes
        each = classes.sizes.sum() / max(len(classes.sizes), 1)
        self._weights = (each / np.maximum(classes.sizes, 1)).astype(np.float32)

    def of(self, part: Part) -> NDArray[np.float32]:
        out = np.ones(len(part.split), np.float32)
        out[part.split == TRAIN] = self._weights[self._classes.numbers(part.train_kinds())]
        return out


class Copies:
    """The number of copies of each record that gives all classes of train equally many entries.

    A class with a third of the records of the largest one has each of them written three times.
    If the ratio is not whole, some of its records, drawn by `seed`, are written once more. None is
    written more than `at_most` times; records of valid and test are written once.
    """

    def __init__(self, classes: Table, seed: int, at_most: int | None = None) -> None:
        self._classes = classes
        self._at_most = at_most
        largest = int(classes.sizes.max(initial=0))
        self._times, self._more = np.divmod(largest, np.maximum(classes.sizes, 1))
        self._ranks = Ranks(classes.sizes, seed, _BALANCE_TAG)

    def next(self, part: Part) -> NDArray[np.int32]:
        """Return the number of copies of the next records; parts must come in order."""
        kinds = self._classes.numbers(part.train_kinds())
        repeated = self._times[kinds] + (self._ranks.next(kinds) < self._more[kinds])
        out = np.ones(len(part.split), np.int32)
        out[part.split == TRAIN] = np.minimum(repeated, self._at_most or repeated)
        return out


_BALANCE_TAG = 0xBA1A
