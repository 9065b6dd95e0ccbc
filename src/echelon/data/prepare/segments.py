"""Cleaning steps in the stretches that can be done in one go.

A step that has to look at all records first, and one that compares them with each other, ends a
stretch: those after it wait until everybody is through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare.step import Step


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps [start, stop), and what is done at its end."""

    number: int
    start: int
    stop: int
    looks: int | None = None
    """The step after it that has to look first."""
    compares: int | None = None
    """The step after it that compares all records."""
    last: bool = False

    @property
    def stage(self) -> str:
        return f"clean-{self.number}"


def segments(steps: Sequence[Step]) -> list[Segment]:
    """At least one, the last of which leaves what is split and encoded."""
    found: list[Segment] = []
    start = 0
    for at, step in enumerate(steps):
        if step.looks:
            found.append(Segment(len(found), start, at, looks=at))
            start = at
        elif compares(step):
            # What it drops need not be cleaned any more: with no steps left, that is all.
            last = at + 1 == len(steps)
            found.append(Segment(len(found), start, at, compares=at, last=last))
            start = at + 1
    if not found or not found[-1].last:
        found.append(Segment(len(found), start, len(steps), last=True))
    return found


@runtime_checkable
class Comparing(Protocol):
    """A step that compares all records with each other: some are too many."""

    def hashes(self, block: pa.RecordBatch) -> dict[str, Any]:
        """In a worker: a few numbers per row to compare them by."""
        ...

    def duplicates(self, keys: Iterable[Mapping[str, Any]], scratch: Path) -> NDArray[np.int64]:
        """In the parent: for each record −1, or the number of the earlier one it repeats."""
        ...


def compares(step: Step) -> bool:
    return isinstance(step, Comparing)


def comparing(step: Step) -> Comparing:
    assert isinstance(step, Comparing), step.kind
    return step
