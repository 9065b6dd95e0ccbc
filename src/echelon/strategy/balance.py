"""How fast a member is beside the others, and which part of a batch is its due.

Members meet once per update, so the slowest sets the pace for all. Each measures how long it
computes for its part. One that is slower than the mean asks for batches to be divided anew, and
all do so after the same update: parts in proportion to samples per second make all equally long.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

SLOWER = 1.15
"""Than the mean by this factor: worth another division."""
SHORT = 0.003
"""Seconds below which an update is mostly what it costs however few samples it has."""
WINDOW_UPDATES = 4
WINDOW_SECONDS = 0.3
"""Measured for so long before anything is said at first, and longer after each division: one that
did not help will not help the next time either."""
LONGER, LONGEST = 1.6, 30.0
OLD = 8.0
"""Windows after which it is measured anew: what was slow need not stay so."""
LEAST = 0.1
"""Of an equal part: what a member gets however slow it is, so that it can be seen to recover."""


class Summing(Protocol):
    """The part of a collective that is needed here."""

    index: int
    count: int

    def sum(self, values: Sequence[float]) -> list[float]: ...


class Pace:
    """One member's time, from update to update."""

    def __init__(self) -> None:
        self.last = 0.0
        """Seconds this member computed for the last update."""
        self._began = 0.0
        self.begin_anew()

    def begin_anew(self) -> None:
        """There are other members."""
        self._window = WINDOW_SECONDS
        self._measure()

    def divided(self) -> None:
        """Parts have changed: what was measured says nothing any more."""
        self._window = min(self._window * LONGER, LONGEST)
        self._measure()

    def _measure(self) -> None:
        self._mine = self._mean = self._samples = 0.0
        self._updates = -1  # the next one is the first that is measured whole

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self, samples: float) -> None:
        """Computed; whatever comes now is waiting for others."""
        self.last = time.perf_counter() - self._began
        if self._updates >= 0:
            self._mine += self.last
            self._samples += samples

    def compare(self, mean: float) -> bool:
        """Hear how long all members took on average; returns whether this one is too slow."""
        self._updates += 1
        if self._updates <= 0:
            return False
        self._mean += mean
        if self._updates < WINDOW_UPDATES or self._mean < self._window:
            return False
        slow = self._mine > SLOWER * self._mean and self._mean > SHORT * self._updates
        if not slow and self._mean > OLD * self._window:
            self._measure()
        return slow

    @property
    def speed(self) -> float:
        """Samples per second of this member alone."""
        return self._samples / self._mine if self._mine else 0.0


def shares(peers: Summing, speed: float) -> list[float]:
    """Every member's part of a batch, the same bits everywhere."""
    speeds = _all(peers, speed)
    total = sum(speeds)
    if not total:
        return [1 / peers.count] * peers.count
    least = LEAST / peers.count
    raised = [max(each / total, least) for each in speeds]
    return [each / sum(raised) for each in raised]


def _all(peers: Summing, value: float) -> list[float]:
    """Everybody's value; a sum takes a few at a time."""
    found: list[float] = []
    for first in range(0, peers.count, 64):
        row = [0.0] * min(64, peers.count - first)
        if first <= peers.index < first + len(row):
            row[peers.index - first] = value
        found += peers.sum(row)
    return found
