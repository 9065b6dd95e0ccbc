"""How many different values there are, and how often each occurs while they are few.

Few values are counted one by one. Of many, only the smallest of their hashes are kept: were they
k of n evenly strewn ones, the k-th would lie at k/n of the whole range, so n is told from it
(bottom-k, Bar-Yossef et al.), with an error of about 1/√k.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.hashing import Words
from echelon.data.inspect.hashes import can_be_hashed, hashed

COUNTED = 4096
"""Values that are counted one by one."""
KEPT = 16_384
"""Hashes that are kept beyond that: estimates are off by 0.8 % (one standard deviation)."""
_PROBE = 4 * COUNTED
_HELD = 16 << 20
"""Bytes of values that are counted one by one: documents need not be kept to be told apart."""


class Count(NamedTuple):
    """How many different values were seen."""

    value: int
    exact: bool


class Distinct:
    """The different values of one column, in flat memory."""

    def __init__(self, kind: Any) -> None:
        self.counts: Counter[Any] | None = Counter()
        """How often each value occurs; None once there are too many."""
        self.kind = kind
        self._smallest = Smallest(KEPT)

    def add(self, column: Any) -> None:
        """Take in values, none of them missing."""
        if self.counts is not None and len(column) > _PROBE:
            self._count(column.slice(0, _PROBE))  # a look is enough to see that there are many
            column = column.slice(_PROBE)
        if self.counts is not None:
            self._count(column)
        else:
            self._smallest.add(hashed(column))

    def count(self) -> Count:
        if self.counts is not None:
            return Count(len(self.counts), True)
        return self._smallest.count()

    def _count(self, column: Any) -> None:
        assert self.counts is not None
        found = pc.value_counts(column)
        values, numbers = found.field("values"), found.field("counts")
        if len(values) <= COUNTED:
            pairs = zip(values.to_pylist(), numbers.to_pylist(), strict=True)
            self.counts.update(dict(pairs))
        each = values.nbytes / max(1, len(values))
        if max(len(values), len(self.counts)) > COUNTED or each * len(self.counts) > _HELD:
            self._smallest.add(hashed(values))
            self._smallest.add(hashed(pa.array(list(self.counts), self.kind)))
            self.counts = None


class Smallest:
    """The smallest of all the words that were seen, each of them once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: Words = np.empty(0, np.uint64)
        self._bound: np.uint64 | None = None

    def add(self, found: Words) -> None:
        if self._bound is not None:
            found = found[found < self._bound]
        if not len(found):
            return
        both = np.sort(np.concatenate([self._kept, found]))
        new = np.ones(len(both), bool)
        np.not_equal(both[1:], both[:-1], out=new[1:])
        self._kept = both[new][: self._size].copy()
        if len(self._kept) == self._size:
            self._bound = self._kept[-1]

    def count(self) -> Count:
        if len(self._kept) < self._size:
            return Count(len(self._kept), True)
        assert self._bound is not None
        share = (float(self._bound) + 1) / 2.0**64
        return Count(round((self._size - 1) / share), False)


def can_be_counted(kind: Any) -> bool:
    return pa.types.is_boolean(kind) or can_be_hashed(kind)
