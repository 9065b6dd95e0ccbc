"""Rare classes count as much as frequent ones: by weight, or by being written several times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.splits.ranks import Keys, Ranks, chunks, numbered

_TAG = 0xBA1A
_TRAIN = 0


def weights(classes: Keys, splits: NDArray[np.int8]) -> NDArray[np.float32]:
    """Records ÷ (classes · records of the class), over train: its mean there is 1.

    Outside of train every record weighs 1: a model is judged on what there is.
    """
    codes, sizes = _sizes(classes, splits)
    whole, kinds = int(sizes.sum()), int(np.count_nonzero(sizes))
    of_class = (whole / (max(kinds, 1) * np.maximum(sizes, 1))).astype(np.float32)
    out = np.ones(len(splits), np.float32)
    for part in chunks(len(splits)):
        out[part] = np.where(splits[part] == _TRAIN, of_class[codes[part]], out[part])
    return out


def copies(
    classes: Keys, splits: NDArray[np.int8], seed: int, at_most: int | None = None
) -> NDArray[np.int32]:
    """How often each record is written, so that all classes of train have as many records.

    A class with a third of the largest one's records gets each of them three times. Where that
    does not divide, some of its records, drawn by `seed`, are taken once more than the others.
    None is taken more than `at_most` times. Outside of train each is written once.
    """
    codes, sizes = _sizes(classes, splits)
    largest = int(sizes.max(initial=0))
    times, more = np.divmod(largest, np.maximum(sizes, 1))
    ranks = Ranks(sizes, seed, _TAG)
    out = np.ones(len(splits), np.int32)
    for part in chunks(len(splits)):
        train = np.flatnonzero(splits[part] == _TRAIN)
        kinds = codes[part][train]
        repeated = times[kinds] + (ranks.next(kinds) < more[kinds])
        out[part][train] = repeated if at_most is None else np.minimum(repeated, at_most)
    return out


def _sizes(classes: Keys, splits: NDArray[np.int8]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The classes' numbers, and how many records of train each has."""
    codes, count = numbered(classes)
    sizes = np.zeros(count, np.int64)
    for part in chunks(len(splits)):
        sizes += np.bincount(codes[part][splits[part] == _TRAIN], minlength=count)
    return codes, sizes
