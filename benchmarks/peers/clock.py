"""What is timed: from the first step after the warm-up to the last, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Counts steps, and remembers when the warm-up was over and when the last step was.

    A side ticks once per step, always at the same point of it: then the span between two ticks
    is whole steps, wherever in a step that point is.
    """

    def __init__(
        self, warmup: int, steps: int, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.total = warmup + steps
        self._warmup = warmup
        self._steps = steps
        self._now = now
        self._count = 0
        self.began = 0.0
        self.ended = 0.0

    def tick(self) -> bool:
        """Count one step; true when there is nothing more to train."""
        self._count += 1
        if self._count == self._warmup:
            self.began = self._now()
        elif self._count == self.total:
            self.ended = self._now()
        return self._count >= self.total

    @property
    def rate(self) -> float:
        """Steps per second."""
        assert self.began < self.ended, f"saw {self._count} of {self.total} steps"
        return self._steps / (self.ended - self.began)
