"""Learning-rate schedules and early stopping.

A schedule gives the learning rate as a factor of the optimizer's own rate. `factor(version)` is for
the update that makes version + 1. Warm-up rises in equal steps and never starts at zero: its first
factor is 1/warmup. The shape of the schedule counts steps from the end of warm-up.

Early stopping watches one validation metric, and says when it is good enough or gets no better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from echelon.core.config import ScheduleSection
from echelon.core.errors import CheckpointError, ConfigError
from echelon.core.interfaces import Schedule


def build(section: ScheduleSection, total_steps: int | None) -> Schedule:
    """Return the schedule a job asks for. `total_steps`: where the run ends, if that is known."""
    warmup, floor = section.warmup, section.floor
    match section.name:
        case "constant":
            return Curve(warmup, lambda _: 1.0)
        case "step":
            every, factor = section.every, section.factor
            assert every is not None, "the section checks this"
            return Curve(warmup, lambda after: max(floor, factor ** (after // every)))
        case "linear":
            span = _span(section, total_steps)
            return Curve(warmup, lambda after: floor + (1 - floor) * _left(after, span))
        case "cosine":
            span = _span(section, total_steps)
            return Curve(warmup, lambda after: floor + (1 - floor) * _cosine(after, span))
        case "plateau":
            return Plateau(warmup, section.factor, section.patience, floor)


def _span(section: ScheduleSection, total_steps: int | None) -> int:
    """Return the steps from the end of warm-up to the end of the schedule."""
    end = section.steps or total_steps
    if end is None:
        raise ConfigError(
            f"schedule {section.name!r} must know where it ends: set schedule.steps",
            path=("schedule", "steps"),
        )
    if section.steps is not None and section.warmup >= section.steps:
        raise ConfigError(
            f"schedule.warmup = {section.warmup}: must be less than schedule.steps "
            f"({section.steps}), where {section.name!r} ends",
            path=("schedule", "warmup"),
        )
    return max(1, end - section.warmup)  # a short trial run may end within its warm-up


def _left(after: int, span: int) -> float:
    return max(0.0, 1 - after / span)


def _cosine(after: int, span: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(1.0, after / span)))


@dataclass(frozen=True, slots=True)
class Curve:
    """A schedule that is a function of the version alone."""

    warmup: int
    shape: Callable[[int], float]
    """Steps after warm-up → factor."""

    def factor(self, version: int) -> float:
        if version < self.warmup:
            return _warm(version, self.warmup)
        return self.shape(version - self.warmup)

    def observe(self, value: float) -> None:
        """Ignore validation results."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise CheckpointError(
                f"the saved schedule has state ({', '.join(sorted(state))}), this one has none"
            )


_IMPROVEMENT = 1e-4
"""The least improvement that counts, as a share of the best result; torch's default."""


class Plateau:
    """A schedule that lowers the rate when validation results stop falling.

    It behaves as torch's ReduceLROnPlateau: `patience` results in a row may fail to be lower than
    the best one by a ten-thousandth of it; the next failure lowers the rate.
    """

    def __init__(self, warmup: int, drop: float, patience: int, floor: float) -> None:
        self.warmup = warmup
        self.drop = drop
        self.patience = patience
        self.floor = floor
        self._level = 1.0
        self._best: float | None = None
        self._waited = 0

    def factor(self, version: int) -> float:
        return _warm(version, self.warmup) * self._level

    def observe(self, value: float) -> None:
        """Take a validation result. One that is not finite is never an improvement."""
        if math.isfinite(value) and (
            self._best is None or value < self._best - _IMPROVEMENT * abs(self._best)
        ):
            self._best = value
            self._waited = 0
            return
        self._waited += 1
        if self._waited > self.patience:
            self._level = max(self.floor, self._level * self.drop)
            self._waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"level": self._level, "best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        match state:
            case {"level": float(level), "best": float() | None as best, "waited": int(waited)}:
                self._level, self._best, self._waited = level, best, waited
            case _:
                raise CheckpointError("the saved schedule is not a plateau: its state does not fit")


def _warm(version: int, warmup: int) -> float:
    return (version + 1) / warmup if version < warmup else 1.0


# Early stopping

Mode = Literal["min", "max"]
SMALLER_IS_BETTER = ("loss", "error", "mse", "mae", "perplexity")  # rmse has mse in it


def stop_mode(mode: Literal["auto", "min", "max"], metric: str) -> Mode:
    """Return whether smaller or larger is better; `auto` decides by the metric's name."""
    if mode != "auto":
        return mode
    return "min" if any(word in metric.lower() for word in SMALLER_IS_BETTER) else "max"


class EarlyStop:
    """Takes one metric per evaluation, and says in `should_stop` when to stop and why.

    `patience`: evaluations without an improvement by more than `min_delta`; `target`: a value to
    stop at.
    """

    def __init__(
        self,
        mode: Mode,
        patience: int | None = None,
        min_delta: float = 0.0,
        target: float | None = None,
    ) -> None:
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.target = target
        self.best: float | None = None
        self.should_stop: str | None = None
        self._waited = 0

    def observe(self, value: float) -> bool:
        """Take a value, and return whether it is the best so far, by more than `min_delta`. NaN
        never is."""
        better = self._is_better(value)
        if better:
            self.best = value
        self._waited = 0 if better else self._waited + 1
        self.should_stop = self.should_stop or self._reason(value)
        return better

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self._waited, "should_stop": self.should_stop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise CheckpointError(f"early stopping cannot go on from {sorted(state)}")
        self.best, self._waited = state["best"], state["waited"]
        self.should_stop = state["should_stop"]

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def _reason(self, value: float) -> str | None:
        if self.target is not None and self._reaches(value, self.target):
            return f"target reached: {value:.6g} (target {self.target:.6g})"
        if self.patience is not None and self._waited >= self.patience:
            best = "no finite value" if self.best is None else f"best {self.best:.6g}"
            return f"no improvement in {self._waited} evaluations ({best})"
        return None

    def _reaches(self, value: float, target: float) -> bool:
        return value <= target if self.mode == "min" else value >= target
