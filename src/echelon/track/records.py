"""What the store gives back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from echelon.track.process import Process

Status = Literal["running", "done", "failed", "stopped"]
SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "rmse")


class Point(NamedTuple):
    """One recorded figure."""

    step: int
    name: str
    value: float
    time: float


class Event(NamedTuple):
    """Something a person should know."""

    step: int
    time: float
    message: str


class Series(NamedTuple):
    """A figure over the steps, in their order."""

    steps: list[int]
    values: list[float]
    times: list[float]


class Best(NamedTuple):
    """The best held-out result of a run; the step is not always known."""

    metric: str
    value: float
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the store knows it."""

    id: str
    name: str
    status: str
    """running, done, failed, stopped; or lost: it says running, but its process is gone."""
    task: str
    strategy: str
    started: float
    opened: float
    seen: float
    finished: float | None
    step: int
    process: Process
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    summary: Mapping[str, Any]
    folder: Path

    @property
    def steps(self) -> int:
        return int(self.summary.get("steps", self.step))

    @property
    def seconds(self) -> float:
        """How long it trained; for a run that goes on, how long it has."""
        if "seconds" in self.summary:
            return float(self.summary["seconds"])
        end = time.time() if self.status == "running" else (self.finished or self.seen)
        return max(0.0, end - self.opened)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures the run ended with."""
        found = self.summary.get("metrics") or {}
        return {name: float(value) for name, value in found.items() if is_number(value)}

    @property
    def headline(self) -> Best | None:
        """The figure to name first: a metric rather than a loss."""
        best, metrics = self.best, self.metrics
        name = _metric_first(metrics)
        if best is None or name is None or "loss" not in best.metric or "loss" in name:
            return best
        return Best(name, metrics[name])

    @property
    def best(self) -> Best | None:
        """What the run itself calls its best; else what it ended with."""
        found = self.summary.get("best")
        if isinstance(found, Mapping) and is_number(found.get("value")):
            return Best(str(found.get("metric", "loss")), found["value"], found.get("step"))
        metrics = self.metrics
        name = _metric_first(metrics)
        return Best(name, metrics[name]) if name is not None else None


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _metric_first(names: Mapping[str, float]) -> str | None:
    return next((name for name in names if "loss" not in name), next(iter(names), None))


def smaller_is_better(metric: str) -> bool:
    return any(word in metric.lower() for word in SMALLER_IS_BETTER)
