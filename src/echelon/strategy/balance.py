"""How fast a member is compared with the others, and which share of a batch it gets.

Members wait for each other in every update, so the slowest one sets the pace. Each member measures
how long it computes for its part. One that is slower than the mean asks for a new division, and all
divide after the same update: shares in proportion to samples per second take equally long.
"""

from __future__ import annotations

import time

from echelon.comm.interface import MOST_VALUES, Collective

SLOWER = 1.15
"""A member that is slower than the mean by this factor asks for a new division."""
SHORT = 0.003
"""Seconds below which an update is mostly overhead, whatever its number of samples."""
WINDOW_UPDATES = 4
WINDOW_SECONDS = 0.3
"""Updates and seconds to measure before the first request. The window grows by `LONGER` after each
division, up to `LONGEST` seconds: a division that did not help will not help the next time either.
"""
LONGER, LONGEST = 1.6, 30.0
OLD = 8.0
"""Windows after which the measurement restarts, because a slow member may recover."""
LEAST = 0.1
"""Fraction of an equal share that a slow member gets at least, so that its recovery is noticed."""


class Pace:
    """Measures how long one member computes, from update to update."""

    def __init__(self) -> None:
        self.last = 0.0
        """Seconds this member computed for the last update."""
        self._began = 0.0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start over with other members."""
        self._window = WINDOW_SECONDS
        self._measure()

    def divided(self) -> None:
        """Start a longer measurement, because the shares have changed."""
        self._window = min(self._window * LONGER, LONGEST)
        self._measure()

    def _measure(self) -> None:
        self._mine = self._mean = self._samples = 0.0
        self._updates = -1  # the update in progress is not measured completely

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self, samples: float) -> None:
        """Note that this member has computed; from here on it waits for others."""
        self.last = time.perf_counter() - self._began
        if self._updates >= 0:
            self._mine += self.last
            self._samples += samples

    def compare(self, mean: float) -> bool:
        """Compare with the mean seconds of all members; return whether this one is too slow."""
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


def shares(peers: Collective, speed: float) -> list[float]:
    """Return every member's share of a batch, the same bits on all members."""
    speeds = _all(peers, speed)
    total = sum(speeds)
    if not total:
        return [1 / peers.count] * peers.count
    least = LEAST / peers.count
    raised = [max(each / total, least) for each in speeds]
    return [each / sum(raised) for each in raised]


def _all(peers: Collective, value: float) -> list[float]:
    """Gather one value from every member, as many at a time as `Collective.sum` takes."""
    found: list[float] = []
    for first in range(0, peers.count, MOST_VALUES):
        row = [0.0] * min(MOST_VALUES, peers.count - first)
        if first <= peers.index < first + len(row):
            row[peers.index - first] = value
        found += peers.sum(row)
    return found
