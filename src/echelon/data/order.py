"""The epoch's shuffled sequence of rows, without a list of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.hashing import Words, key, words
from echelon.data.feistel import Feistel

Rows = NDArray[np.int64]
MOST = 1 << 62
_TAG = 1
"""Keeps orders apart from draws, which are hashed from (seed, epoch) too."""
SORTED = 1 << 12
"""Up to this many rows the order is sorted out once and kept: a few pages of memory, quicker than
a network's fixed cost, and a network over so few values would not be a good shuffle."""


class Order:
    """Which row stands at which position: a pure function of (seed, epoch, n).

    Any process can compute any part of it, at the same cost and in no memory to speak of,
    for up to 2⁶² rows.
    """

    def __init__(self, seed: int, epoch: int, n: int) -> None:
        if not 1 <= n <= MOST:
            raise DataError(f"{n} samples cannot be put in order: there must be 1 to 2**62")
        self.n = n
        self._table: Rows | None = None
        if n <= SORTED:
            # Words of different rows differ, so there are no ties for a sort to break its own way.
            lots = words(np.arange(n, dtype=np.uint64), key(_TAG, seed, epoch, n))
            self._table = lots.argsort()
        else:
            self._network = Feistel(n, _TAG, seed, epoch, n)

    def rows(self, start: int, stop: int) -> Rows:
        """The rows at positions [start, stop)."""
        if not 0 <= start <= stop <= self.n:
            raise IndexError(f"positions [{start}, {stop}) are not within [0, {self.n})")
        if self._table is not None:
            return self._table[start:stop].copy()
        return self._mapped(np.arange(start, stop, dtype=np.uint64))

    def at(self, positions: Rows) -> Rows:
        """The rows at these positions, which the caller knows to be within [0, n)."""
        if self._table is not None:
            return self._table[positions]
        return self._mapped(positions.astype(np.uint64))

    def _mapped(self, values: Words) -> Rows:
        self._network.permute(values)
        return values.view(np.int64)
