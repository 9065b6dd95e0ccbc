"""An even sample of a stream: every value has the same chance, whatever the stream's length.

Each record has a key, a pure function of its number; the records with the smallest keys are the
sample. All columns share the keys, so a second look at the same data finds the same sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from echelon.core.hashing import Words, key, words

_KEY = key(0x5A4D)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def record_keys(first: int, count: int) -> Words:
    """The keys of these records."""
    return words(np.arange(first, first + count, dtype=np.uint64), _KEY)


class Sample:
    """At most `size` values out of all that were added."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: list[Words] = []
        self._values: list[Any] = []
        self._held = 0
        self._bound = _ALL

    def chosen(self, keys: Words) -> Any:
        """Which of these records may belong to the sample, as far as is known by now."""
        rows = np.flatnonzero(keys < self._bound)
        if len(rows) > self._size:
            rows = np.sort(rows[np.argpartition(keys[rows], self._size)[: self._size]])
        return rows

    def add(self, keys: Words, values: Any) -> None:
        """Take in values [N, …] with their keys: those that were chosen, or fewer."""
        self._keys.append(keys)
        self._values.append(values)
        self._held += len(keys)
        if self._held > 2 * self._size:
            self._thin()

    def values(self) -> Any:
        """The sample, in the order of the stream; None if nothing was added."""
        if not self._keys:
            return None
        self._thin()
        return self._values[0]

    def _thin(self) -> None:
        keys, values = np.concatenate(self._keys), np.concatenate(self._values)
        if len(keys) > self._size:
            kept = np.sort(np.argpartition(keys, self._size)[: self._size])
            keys, values = keys[kept], values[kept]
            self._bound = keys.max()
        self._keys, self._values, self._held = [keys], [values], len(keys)
