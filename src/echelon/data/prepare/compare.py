"""Records that repeat earlier ones, told by where those are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.learnt import unpack
from echelon.data.prepare.passes import loaded
from echelon.data.prepare.segments import Segment, comparing
from echelon.data.prepare.work import Work

_OPEN = 32


def drop_repeated(work: Work, segment: Segment, stage: str, sizes: Sequence[int]) -> None:
    """Write for each block the rows that are too many, and why."""
    assert segment.compares is not None
    desk = work.desk

    def hashes() -> Iterator[dict[str, Any]]:
        for number in range(len(sizes)):
            yield unpack(desk.path(segment.stage, number, "hash").read_bytes())

    found = comparing(work.steps[segment.compares]).duplicates(hashes(), desk.stage("scratch"))
    places = _Places(work, segment, sizes)
    desk.stage(stage)
    start = 0
    for number, size in enumerate(sizes):
        earlier = np.asarray(found[start : start + size])
        rows = np.flatnonzero(earlier >= 0)
        told = [f"repeats {where}" for where in places.of(earlier[rows])]
        desk.finish(stage, number, list(zip(rows.tolist(), told, strict=True)))
        start += size
    del found
    desk.clear("scratch")


class _Places:
    """File and line of a record, by its number."""

    def __init__(self, work: Work, segment: Segment, sizes: Sequence[int]) -> None:
        self._starts = np.array([0, *accumulate(sizes)], np.int64)
        self._rows = lru_cache(_OPEN)(lambda number: loaded(work.desk, segment.stage, number))

    def of(self, records: NDArray[np.int64]) -> list[str]:
        blocks = np.searchsorted(self._starts, records, "right") - 1
        found = []
        for record, block in zip(records.tolist(), blocks.tolist(), strict=True):
            file, line = self._rows(block).place(record - int(self._starts[block]))
            found.append(f"{file}:{line}")
        return found
