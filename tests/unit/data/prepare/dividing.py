"""Divide and deal arrays of records part by part, as the plan does with streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from echelon.data.prepare.deal import Copies, Deal, Dealt, Mixing, Weights, train_classes
from echelon.data.prepare.ranking import FREE, SPLITS, Part, Parts
from echelon.data.prepare.splits import By, check_shares, division, folding

SIZE = 317


def parts(size: int, *columns: Any) -> Parts:
    """Return the records of these columns as `Parts` of `size` records."""

    def one_pass() -> Iterator[Part]:
        for low in range(0, max(len(columns[0]), 1), size):
            here = slice(low, low + size)
            found: list[Any] = [None if column is None else column[here] for column in columns]
            yield Part(*found)

    return one_pass


def divide(
    by: By,
    shares: Sequence[float],
    rows: int,
    seed: int,
    keys: Any = None,
    given: Any = None,
    size: int = SIZE,
) -> Any:
    free = np.full(rows, FREE, np.int8) if given is None else given
    whole = parts(size, free, keys)
    found = division(by, shares, seed, whole)
    splits = np.concatenate([found.next(part) for part in whole()])
    assert splits.dtype == np.int8
    check_shares(by, shares, np.bincount(splits, minlength=len(SPLITS)).tolist())
    return splits


def fold(
    by: By, folds: int, rows: int, seed: int, keys: Any = None, given: Any = None, size: int = SIZE
) -> list[Any]:
    """Return, for each fold, the split of all records: TEST or as given."""
    free = np.full(rows, FREE, np.int8) if given is None else given
    whole = parts(size, free, keys)
    made = (folding(by, folds, number, seed, whole) for number in range(folds))
    return [np.concatenate([one.next(part) for part in whole()]) for one in made]


def deal(
    splits: Any,
    shards: Sequence[int],
    seed: int,
    classes: Any = None,
    lengths: Any = None,
    size: int = SIZE,
) -> Dealt:
    whole = parts(size, splits, None, classes, lengths)
    sizes = np.bincount(splits, minlength=len(shards)).tolist()
    dealing = Deal(sizes, shards, seed, whole)
    shard, place = map(np.concatenate, zip(*(dealing.next(part) for part in whole()), strict=True))
    return Dealt(shard, Mixing(sizes, shards, seed).places(splits, shard, place))


def weights(classes: Any, splits: Any) -> Any:
    whole = parts(SIZE, splits, None, classes)
    found = Weights(train_classes(whole))
    return np.concatenate([found.of(part) for part in whole()])


def copies(classes: Any, splits: Any, seed: int, at_most: int | None = None) -> Any:
    whole = parts(SIZE, splits, None, classes)
    found = Copies(train_classes(whole), seed, at_most)
    return np.concatenate([found.next(part) for part in whole()])
