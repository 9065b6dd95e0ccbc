"""Cross-validation: every record is in one fold, and one fold is the test."""

from __future__ import annotations

import numpy as np

from echelon.core.errors import DataError
from echelon.data.prepare.splits.divide import By, Division
from echelon.data.prepare.splits.groups import Groups
from echelon.data.prepare.splits.part import FREE, TEST, Codes, Part, Parts, class_key
from echelon.data.prepare.splits.ranks import Ranks
from echelon.data.prepare.splits.table import Table

_TAG = 0xF01D


def folding(by: By, folds: int, fold: int, seed: int, parts: Parts) -> Division:
    """Who is for the test: the records of `fold`, from 0 on; the others stay as they are.

    Folds differ by one record at most, by class too if `by` is stratified; by group, they are as
    even as groups that stay together let them be, and none is empty.
    """
    if by == "group":
        return _grouped(folds, fold, seed, parts)
    return _Spread(folds, fold, seed, parts)


class _Spread:
    """By ratio too: then all are of one class."""

    def __init__(self, folds: int, fold: int, seed: int, parts: Parts) -> None:
        self._table = Table.of(class_key(part)[part.split == FREE] for part in parts())
        sizes = self._table.sizes
        _enough(folds, int(sizes.sum()), "records")
        self._folds, self._fold = folds, fold
        # A class goes on where the one before it ended: so the folds differ by one in sum, too.
        self._starts = sizes.cumsum() - sizes
        self._ranks = Ranks(sizes, seed, _TAG)

    def next(self, part: Part) -> Codes:
        out = part.split.copy()
        free = np.flatnonzero(out == FREE)
        numbers = self._table.numbers(class_key(part)[free])
        places = self._starts[numbers] + self._ranks.next(numbers)
        out[free[places % self._folds == self._fold]] = TEST
        return out


def _grouped(folds: int, fold: int, seed: int, parts: Parts) -> Groups:
    groups = Groups(parts)
    _enough(folds, len(groups.free), "groups")
    order, numbers = groups.cut([1.0] * folds, seed)
    groups.splits[order[numbers == fold]] = TEST
    return groups


def _enough(folds: int, count: int, what: str) -> None:
    if count < folds:
        raise DataError(f"split into {folds} folds: there are only {count} {what} to divide")
