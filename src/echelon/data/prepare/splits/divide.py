"""Which records are for training, which for validation, which for the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.hashing import key, words
from echelon.data.prepare.splits.apportion import apportion
from echelon.data.prepare.splits.nth import smallest, sortable
from echelon.data.prepare.splits.part import FREE, SPLITS, Codes, Keys, Numbers, Part, Parts
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
        return _Grouped(shares, seed, parts)
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
        self._table = Table.of(_classes(part)[part.split == FREE] for part in parts())
        # Of the records of class c, shuffled, the first cuts[c, 0] are for training, and so on.
        self._cuts = apportion(self._table.sizes, shares).cumsum(1)
        self._ranks = Ranks(self._table.sizes, seed, _TAG)

    def next(self, part: Part) -> Codes:
        out = part.split.copy()
        free = np.flatnonzero(out == FREE)
        numbers = self._table.numbers(_classes(part)[free])
        places = self._ranks.next(numbers)
        for cut in self._cuts.T[:-1]:
            out[free] += places >= cut[numbers]
        out[free] += 1  # from FREE to 0
        return out


def _classes(part: Part) -> Keys:
    return np.zeros(len(part.split), np.int8) if part.key is None else part.key


class _Grouped:
    def __init__(self, shares: Sequence[float], seed: int, parts: Parts) -> None:
        self._table = Table.of(_key(part) for part in parts())
        self._splits = self._known(parts)
        free = np.flatnonzero(self._splits == FREE)
        # Groups one after the other, shuffled; whoever holds a group's middle gets the group.
        order = free[words(sortable(self._table.keys[free]), key(_TAG, seed)).argsort()]
        sizes = self._table.sizes[order]
        middles = sizes.cumsum() - sizes / 2
        wanted = np.array(edges(int(sizes.sum()), shares)[1:-1])
        cuts = _room_for_all(np.searchsorted(middles, wanted), shares, len(order))
        self._splits[order] = np.searchsorted(cuts, np.arange(len(order)), "right")

    def next(self, part: Part) -> Codes:
        return self._splits[self._table.numbers(_key(part))]

    def _known(self, parts: Parts) -> Codes:
        """The split of each group that has one already: its other records go there too."""
        known = np.full(len(self._table.keys), FREE, np.int8)
        passed = 0
        for part in parts():
            have = np.flatnonzero(part.split != FREE)
            numbers, given = self._table.numbers(_key(part)[have]), part.split[have]
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


def _key(part: Part) -> Keys:
    assert part.key is not None, "groups and times are keys"
    return part.key


def _room_for_all(cuts: NDArray[Any], shares: Sequence[float], count: int) -> NDArray[Any]:
    """Cuts that leave every split that has a share at least one of `count` groups."""
    wanted = [int(share > 0) for share in shares]
    if count < sum(wanted):
        return cuts
    for at in range(len(cuts)):
        before = int(cuts[at - 1]) if at else 0
        cuts[at] = min(max(int(cuts[at]), before + wanted[at]), count - sum(wanted[at + 1 :]))
    return cuts


class _Timed:
    def __init__(self, shares: Sequence[float], parts: Parts) -> None:
        _all_timed(parts)
        count = sum(int(np.sum(part.split == FREE)) for part in parts())
        ends = [end for end in edges(count, shares)[1:-1] if end]
        self._skipped = len(SPLITS) - 1 - len(ends)  # the first ones, where they have no share
        self._limits = smallest(
            lambda: (sortable(_key(part)[part.split == FREE]) for part in parts()),
            [end - 1 for end in ends],
        )

    def next(self, part: Part) -> Codes:
        late: Numbers = np.searchsorted(self._limits, sortable(_key(part)), "left")
        return np.where(part.split == FREE, self._skipped + late, part.split).astype(np.int8)


def _all_timed(parts: Parts) -> None:
    passed = 0
    for part in parts():
        times = _key(part)
        if times.dtype.kind == "f" and np.isnan(times).any():
            record = passed + int(np.isnan(times).argmax())
            raise DataError(
                f"split by time: record {record} has no time; drop such records in `clean`"
            )
        passed += len(times)
