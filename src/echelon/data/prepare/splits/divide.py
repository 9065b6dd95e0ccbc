"""Which records are for training, which for validation, which for the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

from echelon.core.errors import DataError
from echelon.data.prepare.splits.apportion import apportion
from echelon.data.prepare.splits.groups import Groups
from echelon.data.prepare.splits.nth import smallest, sortable
from echelon.data.prepare.splits.part import (
    FREE,
    SPLITS,
    Codes,
    Numbers,
    Part,
    Parts,
    class_key,
    given_key,
)
from echelon.data.prepare.splits.ranks import Ranks
from echelon.data.prepare.splits.table import Table
from echelon.data.split import edges

By: TypeAlias = Literal["ratio", "stratified", "group", "time"]
_TAG = 0x5911


class Division(Protocol):
    """Divides records, part after part, from the first on."""

    def next(self, part: Part) -> Codes:
        """The number in SPLITS of each record; those that have one keep it."""
        ...


def division(by: By, shares: Sequence[float], seed: int, parts: Parts) -> Division:
    """How all records are divided; `shares` of train, valid and test are those of the free ones.

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
    """Refuse a division that leaves a split with a share without any record."""
    for name, share, count in zip(SPLITS, shares, counts, strict=True):
        if share > 0 and not count:
            raise DataError(
                f"split by {by}: {name} is to have {share:g} of the records, but of {sum(counts)} "
                f"none falls to it"
            )


class _Stratified:
    """By ratio too: then all are of one class."""

    def __init__(self, shares: Sequence[float], seed: int, parts: Parts) -> None:
        self._table = Table.of(class_key(part)[part.split == FREE] for part in parts())
        # Of the records of class c, shuffled, the first cuts[c, 0] are for training, and so on.
        self._cuts = apportion(self._table.sizes, shares).cumsum(1)
        self._ranks = Ranks(self._table.sizes, seed, _TAG)

    def next(self, part: Part) -> Codes:
        out = part.split.copy()
        free = np.flatnonzero(out == FREE)
        numbers = self._table.numbers(class_key(part)[free])
        places = self._ranks.next(numbers)
        for cut in self._cuts.T[:-1]:
            out[free] += places >= cut[numbers]
        out[free] += 1  # from FREE to 0
        return out


def _grouped(shares: Sequence[float], seed: int, parts: Parts) -> Groups:
    groups = Groups(parts)
    order, numbers = groups.cut(shares, seed)
    groups.splits[order] = numbers
    return groups


class _Timed:
    def __init__(self, shares: Sequence[float], parts: Parts) -> None:
        _all_timed(parts)
        count = sum(int(np.sum(part.split == FREE)) for part in parts())
        ends = [end for end in edges(count, shares)[1:-1] if end]
        self._skipped = len(SPLITS) - 1 - len(ends)  # the first ones, where they have no share
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
