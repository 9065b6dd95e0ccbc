"""One epoch's page of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from echelon.core.errors import CheckpointError
from echelon.data.intervals import Intervals


class Proof(NamedTuple):
    """Of `samples` in an epoch, how many were consumed once, more than once, and never."""

    samples: int
    once: int
    twice: int
    never: int


class EpochPage:
    """Every position is free, out on lease or done; `twice` is the part of done that was redone."""

    __slots__ = ("done", "first", "free", "last", "out", "samples", "twice")

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.free = Intervals([(0, samples)])
        self.out = Intervals()
        self.done = Intervals()
        self.twice = Intervals()
        self.first: int | None = None
        self.last: int | None = None

    def commit(self, start: int, stop: int, version: int) -> None:
        """Record what is no longer free or out on lease."""
        self.done.add(start, stop)
        if self.last is None or version > self.last:
            self.last = version
        if self.first is None or version < self.first:
            self.first = version

    def commit_again(self, start: int, stop: int, version: int) -> int:
        """Record a range of which a part is done already; returns how much of it."""
        again = self.done.common(start, stop)
        for first, last in again:
            self.twice.add(first, last)
        self.free.remove(start, stop)
        self.out.remove(start, stop)
        self.commit(start, stop, version)
        return sum(last - first for first, last in again)

    def give_back_all(self) -> None:
        for start, stop in self.out:
            self.free.add(start, stop)
        self.out.clear()

    def proof(self) -> Proof:
        done, twice = self.done.total, self.twice.total
        return Proof(self.samples, done - twice, twice, self.samples - done)

    def state_dict(self) -> dict[str, Any]:
        """Leases are not part of it: they do not outlive their holders."""
        return {
            "versions": [self.first, self.last],
            "done": [list(pair) for pair in self.done],
            "twice": [list(pair) for pair in self.twice],
        }

    @classmethod
    def restored(cls, samples: int, state: Mapping[str, Any]) -> Self:
        """The page that `state` was taken of; what was out on lease is free again."""
        page = cls(samples)
        page.first, page.last = state["versions"]
        for start, stop in state["done"]:
            if not page.free.take(start, stop):
                raise CheckpointError(
                    f"the ledger's range [{start}, {stop}) overlaps another or is not within "
                    f"[0, {samples})"
                )
            page.done.add(start, stop)
        page.twice = Intervals((start, stop) for start, stop in state["twice"])
        return page
