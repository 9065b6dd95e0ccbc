"""When a run ends."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.config import Job


@dataclass(frozen=True, slots=True)
class Limits:
    """Epochs, steps and seconds; whichever comes first."""

    epochs: int | None
    steps: int | None
    seconds: float | None

    @classmethod
    def of(cls, job: Job) -> Limits:
        return cls(job.epochs, job.steps, None if job.minutes is None else job.minutes * 60)

    def total_steps(self, samples: int, batch_size: int) -> int | None:
        """How many updates there will be at most, if that can be known."""
        per_epoch = -(-samples // batch_size)
        ends = [] if self.epochs is None else [self.epochs * per_epoch]
        ends += [] if self.steps is None else [self.steps]
        return min(ends, default=None)

    def reached(self, version: int) -> str | None:
        """Why to stop at this version, if so."""
        if self.steps is not None and version >= self.steps:
            return f"{self.steps} steps done"
        return None

    def late(self, seconds: float) -> bool:
        """Whether the time is over."""
        return self.seconds is not None and seconds >= self.seconds
