"""Where every record goes: split, shard and place, how often it is written and what it weighs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare.desk import Desk
from echelon.data.prepare.keys import CLASS, LENGTH, SPLIT
from echelon.data.prepare.learnt import pack, unpack
from echelon.data.prepare.recipe import Recipe
from echelon.data.prepare.splits import SPLITS, copies, deal, divide, shard_counts, weights

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
    """Write the plan of each block; how many records each split has, and each block for train."""
    records = _Records(desk, stage, blocks)
    if not records.count:
        raise DataError("no records are left to prepare: quarantine.jsonl says why")
    splits = _splits(recipe, records)
    if not (splits == 0).any():
        raise DataError("no records are left for training")
    times = None
    if recipe.balance is not None and recipe.balance.how == "resample":
        times = copies(records.keys[CLASS], splits, recipe.seed, recipe.balance.at_most)
    entries = _dealt(recipe, records, splits, times, sum(block.bytes for block in blocks))
    if recipe.balance is not None and recipe.balance.how == "weight":
        entries["weight"] = weights(records.keys[CLASS], splits)
    train = _write(desk, records, splits, times, entries)
    counts = np.bincount(splits, minlength=len(SPLITS)).tolist()
    return {"records": dict(zip(SPLITS, counts, strict=True)), "train": train}


class _Records:
    """All records that are left, in order: a few numbers for each."""

    def __init__(self, desk: Desk, stage: str, blocks: Sequence[Cleaned]) -> None:
        self.sizes = [block.rows - len(block.gone) for block in blocks]
        self.count = sum(self.sizes)
        codes = [SPLITS.index(block.split) if block.split else -1 for block in blocks]
        self.given = np.repeat(np.array(codes, np.int8), self.sizes)
        self.keys: dict[str, NDArray[Any]] = {}
        at = 0
        for number, (block, size) in enumerate(zip(blocks, self.sizes, strict=True)):
            for name, values in unpack(desk.path(stage, number, "keys").read_bytes()).items():
                if name not in self.keys:
                    self.keys[name] = np.empty(self.count, values.dtype)
                self.keys[name][at : at + size] = np.delete(values, block.gone)
            at += size


def _splits(recipe: Recipe, records: _Records) -> NDArray[np.int8]:
    split, given = recipe.split, records.given
    if split is None:
        return np.where(given < 0, np.int8(0), given)
    if (given >= 0).all():
        return given
    keys = records.keys.get(SPLIT)
    return divide(split.by, split.shares, records.count, recipe.seed, keys, given)


def _dealt(
    recipe: Recipe,
    records: _Records,
    splits: NDArray[np.int8],
    times: NDArray[np.int32] | None,
    size: int,
) -> dict[str, Any]:
    """Shard and place of everything that is written."""

    def repeated(values: NDArray[Any] | None) -> NDArray[Any] | None:
        return values if values is None or times is None else np.repeat(values, times)

    of_split = repeated(splits)
    assert of_split is not None
    sizes = np.bincount(of_split, minlength=len(SPLITS)).tolist()
    write = recipe.write
    shards, rows = write.shards, write.rows
    if shards is None and rows is None:
        rows = max(1, records.count * _SHARD_BYTES // max(1, size))
    counts = shard_counts(sizes, shards, rows)
    keys = records.keys
    dealt = deal(
        of_split, counts, recipe.seed, repeated(keys.get(CLASS)), repeated(keys.get(LENGTH))
    )
    return {"shard": dealt.shard, "place": dealt.place}


def _write(
    desk: Desk,
    records: _Records,
    splits: NDArray[np.int8],
    times: NDArray[np.int32] | None,
    entries: dict[str, Any],
) -> list[int]:
    desk.stage(STAGE)
    train: list[int] = []
    record = entry = 0
    for number, size in enumerate(records.sizes):
        here = slice(record, record + size)
        written = size if times is None else int(times[here].sum())
        plan: dict[str, Any] = {"split": splits[here], "first": record}
        if times is not None:
            plan["row"] = np.repeat(np.arange(size, dtype=np.int32), times[here])
        for name in ("shard", "place"):
            plan[name] = entries[name][entry : entry + written]
        if "weight" in entries:
            plan["weight"] = entries["weight"][here]
        desk.put(desk.path(STAGE, number, "plan"), pack(plan))
        train.append(int((plan["split"] == 0).sum()))
        record, entry = record + size, entry + written
    return train
