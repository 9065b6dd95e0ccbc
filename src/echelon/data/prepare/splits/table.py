"""The different keys of all records, and how many records have each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.data.prepare.splits.part import Keys, Numbers

_OFTEN = 1 << 20


@dataclass(frozen=True, slots=True)
class Table:
    """Sorted keys; a key's number is its place among them."""

    keys: Keys
    sizes: Numbers

    @classmethod
    def of(cls, parts: Iterable[Keys]) -> Table:
        """Of all records; what is held grows with the different keys alone."""
        found: list[tuple[Keys, Numbers]] = []
        pending = 0
        for part in parts:
            found.append(_counted(part))
            pending += len(found[-1][0])
            if pending > max(_OFTEN, 2 * len(found[0][0])):
                found = [_together(found)]
                pending = len(found[0][0])
        return cls(*_together(found)) if found else cls(np.empty(0), np.empty(0, np.int64))

    def numbers(self, keys: Keys) -> Numbers:
        """The number of each record's key; of one that is not there, that of another."""
        return np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))


def _counted(part: Keys) -> tuple[Keys, Numbers]:
    """By hashing, which is quicker than sorting."""
    counts = pc.value_counts(pa.array(part))
    return counts.field("values").to_numpy(), counts.field("counts").to_numpy()


def _together(found: list[tuple[Keys, Numbers]]) -> tuple[Keys, Numbers]:
    keys, inverse = np.unique(np.concatenate([keys for keys, _ in found]), return_inverse=True)
    sizes = np.zeros(len(keys), np.int64)
    np.add.at(sizes, inverse, np.concatenate([counts for _, counts in found]))
    return keys, sizes
