"""Where every record goes: split, shard and place, how often it is written and what it weighs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.desk import Desk
from echelon.data.prepare.keys import CLASS, LENGTH, SPLIT
from echelon.data.prepare.learnt import pack, unpack
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.splits import (
    FREE,
    SPLITS,
    TRAIN,
    Codes,
    Copies,
    Deal,
    Division,
    Part,
    Weights,
    check_shares,
    division,
    folding,
    shard_counts,
    train_classes,
)

STAGE = "plan"
_SHARD_BYTES = 64 << 20
"""About how much cleaned data goes to a shard, where the recipe does not say."""


class Cleaned(NamedTuple):
    """What is known of a cleaned block."""

    rows: int
    bytes: int
    split: str | None
    gone: NDArray[np.int64]
    """Rows that repeat others."""


def make_plan(recipe: Recipe, desk: Desk, stage: str, blocks: Sequence[Cleaned]) -> Any:
    """Write the plan of each block; how many records each split has, and each block for train.

    None if there is nothing to train on.
    """
    records = _Records(desk, stage, blocks)
    counts = records.divide(recipe)
    if not counts[TRAIN]:
        return None
    size = sum(block.bytes for block in blocks)
    rows = max(1, records.count * _SHARD_BYTES // max(1, size))
    entries = _Entries(recipe, records, rows)
    _write(desk, entries.plans())
    train = [int(np.sum(split == TRAIN)) for split in records.splits]
    return {
        "records": dict(zip(SPLITS, counts, strict=True)),
        "train": train,
        "written": entries.sizes,
        "shards": entries.shards,
    }


class _Records:
    """All records that are left, block by block. Of each one byte is held, its split: the other
    numbers are read from the blocks' files, as often as somebody goes through them."""

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
        """Give a split to those that have none; how many records each split has then."""
        split = recipe.split
        if split is None:
            self.splits = [np.maximum(codes, TRAIN) for codes in self.splits]
            return self._counts()
        if split.folds is not None and split.fold is not None:
            self._give(folding(split.by, split.folds, split.fold, recipe.seed, self.parts))
        if any((codes == FREE).any() for codes in self.splits):
            self._give(division(split.by, split.shares, recipe.seed, self.parts))
            check_shares(split.by, split.shares, self._counts())
        return self._counts()

    def _give(self, splits: Division) -> None:
        self.splits = [splits.next(part) for part in self.parts()]

    def _counts(self) -> list[int]:
        return _counted(self.splits)

    def parts(self) -> Iterator[Part]:
        """The records of each block."""
        for number, (block, codes) in enumerate(zip(self._blocks, self.splits, strict=True)):
            keys = unpack(self._desk.path(self._stage, number, "keys").read_bytes())
            left = {name: np.delete(values, block.gone) for name, values in keys.items()}
            yield Part(codes, left.get(SPLIT), left.get(CLASS), left.get(LENGTH))


class _Entries:
    """Everything that is written: the records, those of rare classes perhaps several times.

    `rows` go to a shard where the recipe does not say.
    """

    def __init__(self, recipe: Recipe, records: _Records, rows: int) -> None:
        self._recipe = recipe
        self._records = records
        self._balance = recipe.balance
        self._classes = train_classes(records.parts) if recipe.balance is not None else None
        write = recipe.write
        of_shard = write.rows if write.rows or write.shards else rows
        self.sizes = _counted(part.split for part, _ in self._written())
        """Of each split."""
        self.shards = shard_counts(self.sizes, write.shards, of_shard)

    def plans(self) -> Iterator[dict[str, Any]]:
        """The plan of each block."""
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
        """What is written of each block, and how often each of its records."""
        if self._classes is None or self._balance is None or not self._resampled:
            yield from ((part, None) for part in self._records.parts())
            return
        copies = Copies(self._classes, self._recipe.seed, self._balance.at_most)
        for part in self._records.parts():
            times = copies.next(part)
            yield part.repeated(times), times


def _counted(splits: Iterable[Codes]) -> list[int]:
    counts = np.zeros(len(SPLITS), np.int64)
    for codes in splits:
        counts += np.bincount(codes, minlength=len(SPLITS))
    return [int(count) for count in counts]


def _write(desk: Desk, plans: Iterator[dict[str, Any]]) -> None:
    desk.stage(STAGE)
    for number, plan in enumerate(plans):
        desk.put(desk.path(STAGE, number, "plan"), pack(plan))
