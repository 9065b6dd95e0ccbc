"""Which records are for training, which for validation, which for the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.hashing import key, words
from echelon.data.prepare.splits.apportion import apportion
from echelon.data.prepare.splits.ranks import Keys, Ranks, chunks, numbered
from echelon.data.split import edges

By: TypeAlias = Literal["ratio", "stratified", "group", "time"]
Codes: TypeAlias = NDArray[np.int8]

SPLITS = ("train", "valid", "test")
_FREE = -1
_TAG = 0x5911


def divide(
    by: By,
    shares: Sequence[float],
    rows: int,
    seed: int,
    keys: Keys | None = None,
    given: Codes | None = None,
) -> Codes:
    """The number in `SPLITS` of each of `rows` records.

    `shares` are those of train, valid and test. Records with a split in `given` (−1: none) keep
    it; the shares are those of the others.

    - ratio: at random, within one record of the shares.
    - stratified: the same within every class (`keys`), within one record in each, and every class
      has at least one record in train.
    - group: records with the same key stay together; each cut is within half a group of its share.
    - time: the earliest records are for training, the latest for the test; records of the same
      time stay together, with the earlier split.
    """
    assert (keys is None) == (by == "ratio"), "keys are for what is not divided by ratio"
    out = np.full(rows, _FREE, np.int8) if given is None else given.astype(np.int8)
    if by == "ratio":
        _stratified(np.zeros(rows, np.int32), 1, shares, seed, out)
    elif by == "stratified":
        assert keys is not None
        _stratified(*numbered(keys), shares, seed, out)
    elif by == "group":
        assert keys is not None
        _grouped(*numbered(keys), shares, seed, out)
    else:
        assert keys is not None
        _timed(keys, shares, out)
    _none_empty(by, shares, out)
    return out


def _stratified(
    classes: NDArray[np.int32], count: int, shares: Sequence[float], seed: int, out: Codes
) -> None:
    sizes = np.zeros(count, np.int64)
    for part in chunks(len(out)):
        sizes += np.bincount(classes[part][out[part] == _FREE], minlength=count)
    # Of the records of class c, shuffled, the first cuts[c, 0] are for training, and so on.
    cuts = apportion(sizes, shares).cumsum(1)
    ranks = Ranks(sizes, seed, _TAG)
    for part in chunks(len(out)):
        free = np.flatnonzero(out[part] == _FREE)
        numbers = classes[part][free]
        places = ranks.next(numbers)
        out[part][free] = (places[:, None] >= cuts[numbers, :-1]).sum(1)


def _grouped(
    groups: NDArray[np.int32], count: int, shares: Sequence[float], seed: int, out: Codes
) -> None:
    known = _known(groups, count, out)
    sizes = np.zeros(count, np.int64)
    for part in chunks(len(out)):
        sizes += np.bincount(groups[part], minlength=count)
    free = np.flatnonzero(known == _FREE)
    # Groups one after the other, shuffled; whoever holds a group's middle gets the group.
    order = free[words(free.astype(np.uint64), key(_TAG, seed)).argsort()]
    middles = sizes[order].cumsum() - sizes[order] / 2
    wanted = np.array(edges(int(sizes[order].sum()), shares)[1:-1])
    cuts = _room_for_all(np.searchsorted(middles, wanted), shares, len(order))
    known[order] = np.searchsorted(cuts, np.arange(len(order)), "right")
    for part in chunks(len(out)):
        out[part] = known[groups[part]]


def _known(groups: NDArray[np.int32], count: int, given: Codes) -> Codes:
    """The split of each group that has one already: its other records go there too."""
    known = np.full(count, _FREE, np.int8)
    for part in chunks(len(given)):
        have = given[part] != _FREE
        known[groups[part][have]] = given[part][have]
    for part in chunks(len(given)):
        clash = (given[part] != _FREE) & (given[part] != known[groups[part]])
        if clash.any():
            at = int(clash.argmax())
            here, there = given[part][at], known[groups[part][at]]
            raise DataError(
                f"split by group: the inputs have the group of record {part.start + at} both in "
                f"{SPLITS[here]} and in {SPLITS[there]}"
            )
    return known


def _room_for_all(cuts: NDArray[Any], shares: Sequence[float], count: int) -> NDArray[Any]:
    """Cuts that leave every split that has a share at least one of `count` groups."""
    wanted = [int(share > 0) for share in shares]
    if count < sum(wanted):
        return cuts
    for at in range(len(cuts)):
        before = int(cuts[at - 1]) if at else 0
        cuts[at] = min(max(int(cuts[at]), before + wanted[at]), count - sum(wanted[at + 1 :]))
    return cuts


def _timed(times: Keys, shares: Sequence[float], out: Codes) -> None:
    if times.dtype.kind == "f" and np.isnan(times).any():
        record = int(np.isnan(times).argmax())
        raise DataError(f"split by time: record {record} has no time; drop such records in `clean`")
    ordered = times[out == _FREE]
    ends = [end for end in edges(len(ordered), shares)[1:-1] if end]
    last = np.array(ends, np.int64) - 1
    ordered.partition(last)
    limits = ordered[last]
    skipped = len(SPLITS) - 1 - len(ends)  # the first ones, where they have no share
    for part in chunks(len(out)):
        codes = skipped + np.searchsorted(limits, times[part], "left")
        out[part] = np.where(out[part] == _FREE, codes, out[part])


def _none_empty(by: str, shares: Sequence[float], out: Codes) -> None:
    counts = np.bincount(out, minlength=len(SPLITS))
    for name, share, count in zip(SPLITS, shares, counts, strict=True):
        if share > 0 and not count:
            raise DataError(
                f"split by {by}: {name} is to have {share:g} of the records, but of {len(out)} "
                f"none falls to it"
            )
