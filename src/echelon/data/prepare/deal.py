"""Balanced shards, shuffling, class balance.

Which split, which shard and which place a record gets, how often it is written, what it weighs.

A few bytes per record go by, several times, and nothing is kept of them but counts: what it takes
does not grow with the records. The same records and seed give the same result.
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

# --- deal ---
# Which shard and which place in it a record gets: every shard is a small likeness of its split.

_DEAL_TAG = 0xDEA1
_CELLS = 1 << 12
_MOST_BINS = 1 << 8
_SAMPLE = 1 << 16


class Dealt(NamedTuple):
    """For each record its shard, numbered within its split, and its place among that shard's."""

    shard: NDArray[np.int32]
    place: Numbers


def shard_counts(
    sizes: Sequence[int], shards: int | None = None, rows: int | None = None
) -> list[int]:
    """How many shards each split gets: `shards`, or as many as hold `rows` each; none is empty."""
    assert (shards is None) != (rows is None), "say how many shards, or how many rows in each"
    if shards is not None:
        return [min(shards, size) for size in sizes]
    assert rows is not None
    return [-(-size // rows) for size in sizes]


class Deal:
    """Deals each split's records out to its shards like cards, sorted by class and then length.

    So shards of a split differ by at most one record, and by at most one record in each class.
    Lengths rise through one class and fall through the next: what the last shard is ahead in one
    it is behind in the other, and sums of lengths stay alike. Records alike in both are mixed
    first, by `seed`; how all records of a shard are mixed in the end, `Mixing` says.
    """

    def __init__(
        self, sizes: Sequence[int], shards: Sequence[int], seed: int, parts: Parts
    ) -> None:
        """`sizes` are the records of each split, `shards` its shards; all parts have a split."""
        for size, count in zip(sizes, shards, strict=True):
            if size and not 1 <= count <= size:
                raise DataError(f"{size} records cannot be dealt out to {count} shards")
        self._cells = _Cells(sizes, parts)
        filled = np.zeros(self._cells.count, np.int64)
        for part in parts():
            filled += np.bincount(self._cells.of(part), minlength=self._cells.count)
        # A split's cells are one after the other: its cards are numbered from 0.
        before = np.cumsum(sizes) - sizes
        self._first = filled.cumsum() - filled
        self._first -= np.repeat(before, self._cells.count // len(shards))
        self._dealing = Dealing(self._cells.count, seed, _DEAL_TAG)
        self._hands = np.maximum(np.array(shards), 1)

    def next(self, part: Part) -> Dealt:
        """Of the records after those that have been asked for already."""
        cells = self._cells.of(part)
        cards = self._first[cells] + self._dealing.next(cells)
        hands = self._hands[part.split]
        return Dealt((cards % hands).astype(np.int32), cards // hands)


class _Cells:
    """One number per record for split, class and length, in the order they are dealt in."""

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


def _kinds(part: Part) -> Keys:
    return np.zeros(len(part.split), np.int8) if part.kind is None else part.kind


def _sample(parts: Parts, count: int) -> Keys:
    """Lengths of records at fixed places."""
    step = max(1, count // _SAMPLE)
    found: list[Keys] = []
    passed = 0
    for part in parts():
        if part.length is not None:
            found.append(part.length[-passed % step :: step].copy())  # not a view of it all
        passed += len(part.split)
    return np.concatenate(found) if found else np.empty(0)


def _bounds(sample: Keys, bins: int) -> Keys:
    """Lengths that cut the records into parts of about equal sums.

    So there are most bounds where records are long: there a difference counts.
    """
    if not len(sample):
        return sample
    sample = np.sort(sample)
    sums = sample.cumsum(dtype=np.float64)
    at = np.searchsorted(sums, np.arange(1, bins) / bins * sums[-1])
    return np.unique(sample[at])


# --- mix ---
# All records of a shard are mixed in the end: whoever writes them can find out where each goes.

_MIX_TAG = 0xDEA1


class Mixing:
    """Cards lie in their hand as they were dealt, sorted by class: here every hand is mixed.

    `sizes` are the records of each split, `shards` its shards.
    """

    def __init__(self, sizes: Sequence[int], shards: Sequence[int], seed: int) -> None:
        hands = np.maximum(np.array(shards), 1)
        self._hand_of = np.cumsum(hands) - hands
        self._orders = list(_orders(sizes, hands.tolist(), seed))

    def places(self, split: Codes, shard: NDArray[np.int32], place: Numbers) -> Numbers:
        """Where in their shards they are written."""
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
    """How each hand is mixed; one without cards is not."""
    for split, (size, count) in enumerate(zip(sizes, hands, strict=True)):
        for number in range(count):
            cards = (size - number + count - 1) // count
            yield Order(key(_MIX_TAG, seed, split), number, cards) if cards else None


# --- balance ---
# Rare classes count as much as frequent ones: by weight, or by being written several times.

_BALANCE_TAG = 0xBA1A


def train_classes(parts: Parts) -> Table:
    """The classes of train."""
    return Table.of(part.train_kinds() for part in parts())


class Weights:
    """Records ÷ (classes · records of the class), over train: its mean there is 1.

    Outside of train every record weighs 1: a model is judged on what there is.
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
    """How often each record is written, so that all classes of train have as many records.

    A class with a third of the largest one's records gets each of them three times. Where that
    does not divide, some of its records, drawn by `seed`, are taken once more than the others.
    None is taken more than `at_most` times. Outside of train each is written once.
    """

    def __init__(self, classes: Table, seed: int, at_most: int | None = None) -> None:
        self._classes = classes
        self._at_most = at_most
        largest = int(classes.sizes.max(initial=0))
        self._times, self._more = np.divmod(largest, np.maximum(classes.sizes, 1))
        self._ranks = Ranks(classes.sizes, seed, _BALANCE_TAG)

    def next(self, part: Part) -> NDArray[np.int32]:
        """Of the records after those that have been asked for already."""
        kinds = self._classes.numbers(part.train_kinds())
        repeated = self._times[kinds] + (self._ranks.next(kinds) < self._more[kinds])
        out = np.ones(len(part.split), np.int32)
        out[part.split == TRAIN] = np.minimum(repeated, self._at_most or repeated)
        return out
