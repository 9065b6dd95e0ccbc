"""Rare classes count as much as frequent ones: by weight, or by being written several times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.splits.part import TRAIN, Part, Parts
from echelon.data.prepare.splits.ranks import Ranks
from echelon.data.prepare.splits.table import Table

_TAG = 0xBA1A


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
        self._ranks = Ranks(classes.sizes, seed, _TAG)

    def next(self, part: Part) -> NDArray[np.int32]:
        """Of the records after those that have been asked for already."""
        kinds = self._classes.numbers(part.train_kinds())
        repeated = self._times[kinds] + (self._ranks.next(kinds) < self._more[kinds])
        out = np.ones(len(part.split), np.int32)
        out[part.split == TRAIN] = np.minimum(repeated, self._at_most or repeated)
        return out
