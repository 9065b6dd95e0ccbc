"""Adds up what the updates report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from echelon.core.types import Update


class Meter:
    """Loss and speed since the last reading, and totals since the start."""

    def __init__(self, samples: int = 0) -> None:
        self.samples = samples
        self._loss_sum = 0.0
        self._weight = 0.0
        self._last_loss = float("nan")
        self.steps = 0
        self._samples = 0
        self._since = time.perf_counter()
        self._rates = (0.0, 0.0)

    def add(self, done: Update, size: int, steps: int = 1) -> None:
        """An update of so many samples; or `steps` like it, of which others made the rest."""
        self._loss_sum += done.loss_sum
        self._weight += done.weight
        self.steps += steps
        self._samples += size * steps
        self.samples += size * steps

    def peek(self) -> dict[str, float]:
        """Loss and rates of the current window, or of the last one while this one is empty."""
        seconds = time.perf_counter() - self._since
        if self.steps and seconds > 0:
            self._rates = (self.steps / seconds, self._samples / seconds)
        if self._weight:
            self._last_loss = self._loss_sum / self._weight
        return {
            "loss": self._last_loss,
            "steps_per_s": self._rates[0],
            "samples_per_s": self._rates[1],
        }

    def read(self) -> dict[str, float]:
        """The current window's figures; a new window begins."""
        values = self.peek()
        self.restart()
        return values

    def restart(self) -> None:
        """Begin a new window."""
        self._loss_sum, self._weight, self.steps, self._samples = 0.0, 0.0, 0, 0
        self._since = time.perf_counter()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent inside, on an evaluation say, does not count as training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began
