"""The plan: split, shard and position of every record, made in the parent after cleaning.

    keys of each block ─▶ _Records.divide ─▶ _Entries.plans ─▶ one plan file per block
    (class, group, time,   split by ratio,    copies or weights (Copies, Weights),
     length: a few bytes)  class, group,      shard and place (Deal)
                           time or fold

Only one byte per record, its split, is held in memory. Everything else streams: each step goes
through the key files of all blocks as often as it needs and remembers counts (ranking.py). The
plan depends on the records, their order and the seed alone, not on where blocks were cut.

A division says for each record that has no split yet (FREE) which one it gets. Records of inputs
with a `split` of their own keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.files import write_atomic
from echelon.core.hashing import key, words
from echelon.data.ledger import edges
from echelon.data.prepare.deal import Copies, Deal, Weights, shard_counts, train_classes
from echelon.data.prepare.outline import CLASS, LENGTH, SPLIT
from echelon.data.prepare.ranking import (
    FREE,
    SPLITS,
    TEST,
    TRAIN,
    Codes,
    Numbers,
    Part,
    Parts,
    Ranks,
    Table,
    apportion,
    class_key,
    given_key,
    smallest,
    sortable,
)
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.workdir import Desk, pack, unpack

STAGE = "plan"
_SHARD_BYTES = 64 << 20
"""About how much cleaned data a shard holds by default."""


def make_plan(recipe: Recipe, desk: Desk, stage: str, blocks: Sequence[Cleaned]) -> Any:
    """Write the plan of each block; return the counts that later passes need.

    These are: the records of each split, the train records of each block, and the entries and
    shards of each split. Return None if there is nothing to train on. `stage` is the last cleaning
    segment, whose files hold the keys.
    """
    records = _Records(desk, stage, blocks)
    counts = records.divide(recipe)
    if not counts[TRAIN]:
        return None
    size = sum(block.bytes for block in blocks)
    rows = max(1, records.count * _SHARD_BYTES // max(1, size))
    entries = _Entries(recipe, records, rows)
    desk.stage(STAGE)
    for number, plan in enumerate(entries.plans()):
        write_atomic(desk.path(STAGE, number, "plan"), pack(plan))
    train = [int(np.sum(split == TRAIN)) for split in records.splits]
    return {
        "records": dict(zip(SPLITS, counts, strict=True)),
        "train": train,
        "written": entries.sizes,
        "shards": entries.shards,
    }


class Cleaned(NamedTuple):
    """A cleaned block as the engine knows it."""

    rows: int
    bytes: int
    split: str | None
    gone: NDArray[np.int64]
    """Rows that are left out, because they repeat others."""


class _Records:
    """All records that are left after cleaning, block by block.

    Holds one byte per record, its split. `parts` reads the keys from the blocks' files each time.
    """

    def __init__(self, desk: Desk, stage: str, blocks: Sequence[Cleaned]) -> None:
        self._desk = desk
        self._stage = stage
        self._blocks = blocks
        sizes = [block.rows - len(block.gone) for block in blocks]
        codes = [SPLITS.index(block.split) if block.split else FREE for block in blocks]
        self.count = sum(sizes)
        self.splits: list[Codes] = [
            np.full(size, code, np.int8) for size, code in zip(sizes, codes, strict=True)
        ]

    def divide(self, recipe: Recipe) -> list[int]:
        """Give a split to the records that have none; return the number of records of each."""
        split = recipe.split
        if split is None:
            self.splits = [np.maximum(codes, TRAIN) for codes in self.splits]
            return _counted(self.splits)
        if split.folds is not None and split.fold is not None:
            self._give(folding(split.by, split.folds, split.fold, recipe.seed, self.parts))
        if any((codes == FREE).any() for codes in self.splits):
            self._give(division(split.by, split.shares, recipe.seed, self.parts))
            check_shares(split.by, split.shares, _counted(self.splits))
        return _counted(self.splits)

    def _give(self, splits: Division) -> None:
        self.splits = [splits.next(part) for part in self.parts()]

    def parts(self) -> Iterator[Part]:
        """Yield split and keys of the records of each block."""
        for number, (block, codes) in enumerate(zip(self._blocks, self.splits, strict=True)):
            keys = unpack(self._desk.path(self._stage, number, "keys").read_bytes())
            left = {name: np.delete(values, block.gone) for name, values in keys.items()}
            yield Part(codes, left.get(SPLIT), left.get(CLASS), left.get(LENGTH))


class _Entries:
    """Everything that is written: each record once, or several times under `balance: resample`.

    `rows` is the default number of entries per shard.
    """

    def __init__(self, recipe: Recipe, records: _Records, rows: int) -> None:
        self._recipe = recipe
        self._records = records
        self._balance = recipe.balance
        self._classes = train_classes(records.parts) if recipe.balance is not None else None
        write = recipe.write
        of_shard = write.rows if write.rows or write.shards else rows
        self.sizes = _counted(part.split for part, _ in self._written())
        """The number of entries of each split."""
        self.shards = shard_counts(self.sizes, write.shards, of_shard)

    def plans(self) -> Iterator[dict[str, Any]]:
        """Yield the plan of each block.

        Per record: `split` and, if weighed, `weight`; `first` is the number of the first record.
        Per entry: `shard`, `place` and, if resampled, `row`, the record that it is a copy of.
        """
        deal = Deal(self.sizes, self.shards, self._recipe.seed, self._parts)
        weights = None
        if self._classes is not None and not self._resampled:
            weights = Weights(self._classes)
        first = 0
        for codes, (part, times) in zip(self._records.splits, self._written(), strict=True):
            plan: dict[str, Any] = {"split": codes, "first": first, **deal.next(part)._asdict()}
            if times is not None:
                plan["row"] = np.repeat(np.arange(len(codes), dtype=np.int32), times)
            if weights is not None:
                plan["weight"] = weights.of(part)
            yield plan
            first += len(codes)

    def _parts(self) -> Iterator[Part]:
        return (part for part, _ in self._written())

    @property
    def _resampled(self) -> bool:
        return self._balance is not None and self._balance.how == "resample"

    def _written(self) -> Iterator[tuple[Part, NDArray[np.int32] | None]]:
        """Yield the entries of each block, and how often each of its records is among them."""
        if self._classes is None or self._balance is None or not self._resampled:
            yield from ((part, None) for part in self._records.parts())
            return
        copies = Copies(self._classes, self._recipe.seed, self._balance.at_most)
        for part in self._records.parts():
            times = copies.next(part)
            yield part.repeated(times), times


def _counted(splits: Iterable[Codes]) -> list[int]:
    """Return the number of records of each split."""
    counts = np.zeros(len(SPLITS), np.int64)
    for codes in splits:
        counts += np.bincount(codes, minlength=len(SPLITS))
    return [int(count) for count in counts]


# Dividing records among train, valid and test


By: TypeAlias = Literal["ratio", "stratified", "group", "time"]


class Division(Protocol):
    """Divides all records, which are passed part by part in their order."""

    def next(self, part: Part) -> Codes:
        """Return the split of each record, an index into SPLITS; records with a split keep it."""
        ...


def division(by: By, shares: Sequence[float], seed: int, parts: Parts) -> Division:
    """Return the division into train, valid and test; `shares` are of the records without a split.

    - ratio: at random, within one record of the shares.
    - stratified: the same within every class (`key`), within one record in each, and every class
      has at least one record in train.
    - group: records with the same key stay together; each cut is within half a group of its share.
    - time: the earliest records are for training, the latest for the test; records of the same
      time stay together, with the earlier split.
    """
    if by == "group":
        return _grouped(shares, seed, parts)
    if by == "time":
        return _Timed(shares, parts)
    return _Stratified(shares, seed, parts)


def check_shares(by: By, shares: Sequence[float], counts: Sequence[int]) -> None:
    """Raise DataError if a split with a share got no record."""
    for name, share, count in zip(SPLITS, shares, counts, strict=True):
        if share > 0 and not count:
            raise DataError(
                f"split by {by}: {name} is to have {share:g} of the records, but of {sum(counts)} "
                f"none falls to it"
            )


_SPLIT_TAG = 0x5911
"""Distinguishes these random numbers from others of the same seed."""


class _Stratified:
    """Divides each class by the shares; `ratio` is the case of a single class."""

    def __init__(self, shares: Sequence[float], seed: int, parts: Parts) -> None:
        self._table = Table.of(class_key(part)[part.split == FREE] for part in parts())
        # Of the shuffled records of class c the first cuts[c, 0] are for training, and so on.
        self._cuts = apportion(self._table.sizes, shares).cumsum(1)
        self._ranks = Ranks(self._table.sizes, seed, _SPLIT_TAG)

    def next(self, part: Part) -> Codes:
        out = part.split.copy()
        free = np.flatnonzero(out == FREE)
        numbers = self._table.numbers(class_key(part)[free])
        places = self._ranks.next(numbers)
        for cut in self._cuts.T[:-1]:
            out[free] += places >= cut[numbers]
        out[free] += 1  # from FREE to 0
        return out


class _Timed:
    """Divides by time, at the times of the last record of train and of valid."""

    def __init__(self, shares: Sequence[float], parts: Parts) -> None:
        _all_timed(parts)
        count = sum(int(np.sum(part.split == FREE)) for part in parts())
        ends = [end for end in edges(count, shares)[1:-1] if end]
        self._skipped = len(SPLITS) - 1 - len(ends)  # leading splits that have no share
        self._limits = smallest(
            lambda: (sortable(given_key(part)[part.split == FREE]) for part in parts()),
            [end - 1 for end in ends],
        )

    def next(self, part: Part) -> Codes:
        late: Numbers = np.searchsorted(self._limits, sortable(given_key(part)), "left")
        return np.where(part.split == FREE, self._skipped + late, part.split).astype(np.int8)


def _all_timed(parts: Parts) -> None:
    passed = 0
    for part in parts():
        times = given_key(part)
        if times.dtype.kind == "f" and np.isnan(times).any():
            record = passed + int(np.isnan(times).argmax())
            raise DataError(
                f"split by time: record {record} has no time; drop such records in `clean`"
            )
        passed += len(times)


def _grouped(shares: Sequence[float], seed: int, parts: Parts) -> Groups:
    groups = Groups(parts)
    order, numbers = groups.cut(shares, seed)
    groups.splits[order] = numbers
    return groups


# Cross-validation: dividing records among folds


def folding(by: By, folds: int, fold: int, seed: int, parts: Parts) -> Division:
    """Return the division that puts the records of `fold` (from 0) into test; others stay free.

    Folds differ by at most one record, in each class too if `by` is stratified. By group, they are
    as even as whole groups permit, and none is empty.
    """
    if by == "group":
        return _grouped_folds(folds, fold, seed, parts)
    return _Spread(folds, fold, seed, parts)


_FOLD_TAG = 0xF01D


class _Spread:
    """Spreads each class evenly over the folds; `ratio` is the case of a single class."""

    def __init__(self, folds: int, fold: int, seed: int, parts: Parts) -> None:
        self._table = Table.of(class_key(part)[part.split == FREE] for part in parts())
        sizes = self._table.sizes
        _enough(folds, int(sizes.sum()), "records")
        self._folds, self._fold = folds, fold
        # A class continues where the one before it ended, so the totals differ by one at most, too.
        self._starts = sizes.cumsum() - sizes
        self._ranks = Ranks(sizes, seed, _FOLD_TAG)

    def next(self, part: Part) -> Codes:
        out = part.split.copy()
        free = np.flatnonzero(out == FREE)
        numbers = self._table.numbers(class_key(part)[free])
        places = self._starts[numbers] + self._ranks.next(numbers)
        out[free[places % self._folds == self._fold]] = TEST
        return out


def _grouped_folds(folds: int, fold: int, seed: int, parts: Parts) -> Groups:
    groups = Groups(parts)
    _enough(folds, len(groups.free), "groups")
    order, numbers = groups.cut([1.0] * folds, seed)
    groups.splits[order[numbers == fold]] = TEST
    return groups


def _enough(folds: int, count: int, what: str) -> None:
    if count < folds:
        raise DataError(f"split into {folds} folds: there are only {count} {what} to divide")


# Groups, which are divided as a whole


class Groups:
    """The split of every group; those in `free` have none yet: callers `cut` and assign them."""

    def __init__(self, parts: Parts) -> None:
        self._table = Table.of(given_key(part) for part in parts())
        self.splits = self._known(parts)
        self.free: Numbers = np.flatnonzero(self.splits == FREE)

    def next(self, part: Part) -> Codes:
        return self.splits[self._table.numbers(given_key(part))]

    def cut(self, shares: Sequence[float], seed: int) -> tuple[Numbers, Numbers]:
        """Return the free groups, shuffled, and the index of the share that each falls to."""
        hashes = words(sortable(self._table.keys[self.free]), key(_SPLIT_TAG, seed))
        order = self.free[hashes.argsort()]
        sizes = self._table.sizes[order]
        # Lay the groups end to end: a group belongs to the share that contains its middle.
        middles = sizes.cumsum() - sizes / 2
        wanted = np.array(edges(int(sizes.sum()), shares)[1:-1])
        cuts = _room_for_all(np.searchsorted(middles, wanted), shares, len(order))
        return order, np.searchsorted(cuts, np.arange(len(order)), "right")

    def _known(self, parts: Parts) -> Codes:
        """Return the split of each group with a record that has one: all its records go there."""
        known = np.full(len(self._table.keys), FREE, np.int8)
        passed = 0
        for part in parts():
            have = np.flatnonzero(part.split != FREE)
            numbers, given = self._table.numbers(given_key(part)[have]), part.split[have]
            before = known[numbers]
            known[numbers] = given
            clash = ((before != FREE) & (before != given)) | (known[numbers] != given)
            if clash.any():
                _refuse(passed + int(have[clash.argmax()]))
            passed += len(part.split)
        return known


def _refuse(record: int) -> None:
    raise DataError(
        f"split by group: the inputs have put the group of record {record} into several splits"
    )


def _room_for_all(cuts: NDArray[Any], shares: Sequence[float], count: int) -> NDArray[Any]:
    """Move cuts so that each positive share gets at least one of `count` groups, if possible."""
    wanted = [int(share > 0) for share in shares]
    if count < sum(wanted):
        return cuts
    left = sum(wanted)
    for at in range(len(cuts)):
        before = int(cuts[at - 1]) if at else 0
        left -= wanted[at]
        cuts[at] = min(max(int(cuts[at]), before + wanted[at]), count - left)
    return cuts
