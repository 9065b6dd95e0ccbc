"""What the run store gives back: runs, their recorded values, and the processes that own them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

Status = Literal["running", "done", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the store knows it."""

    id: str
    name: str
    status: str
    """running, done, failed, stopped, or lost (recorded as running, but its process is gone)."""
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
        """Seconds of training; for a running run, the seconds so far."""
        if "seconds" in self.summary:
            return float(self.summary["seconds"])
        end = time.time() if self.status == "running" else (self.finished or self.seen)
        return max(0.0, end - self.opened)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics at the end of the run."""
        found = self.summary.get("metrics") or {}
        return {name: float(value) for name, value in found.items() if is_number(value)}

    @property
    def headline(self) -> Best | None:
        """The result to show first: a metric rather than a loss, if there is one."""
        best, metrics = self.best, self.metrics
        name = _metric_first(metrics)
        if best is None or name is None or "loss" not in best.metric or "loss" in name:
            return best
        return Best(name, metrics[name])

    @property
    def best(self) -> Best | None:
        """The best result the run recorded, or else its final one."""
        found = self.summary.get("best")
        if isinstance(found, Mapping) and is_number(found.get("value")):
            return Best(str(found.get("metric", "loss")), found["value"], found.get("step"))
        metrics = self.metrics
        name = _metric_first(metrics)
        return Best(name, metrics[name]) if name is not None else None


class Best(NamedTuple):
    """The best validation result of a run; its step is not always known."""

    metric: str
    value: float
    step: int | None = None


class Point(NamedTuple):
    """One recorded value."""

    step: int
    name: str
    value: float
    time: float


class Event(NamedTuple):
    """A notice for people: what happened at which step."""

    step: int
    time: float
    message: str


class Series(NamedTuple):
    """The values of one name over the steps, in order."""

    steps: list[int]
    values: list[float]
    times: list[float]


class Process(NamedTuple):
    """A process; `born` distinguishes it from a later process with the same pid."""

    host: str
    pid: int
    born: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; always False for another machine, where we cannot look."""
        if not self.is_here:
            return False
        return not _exists(self.pid) or born(self.pid) != self.born


def this_process() -> Process:
    pid = os.getpid()
    return Process(socket.gethostname(), pid, born(pid))


SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "rmse")


def smaller_is_better(metric: str) -> bool:
    return any(word in metric.lower() for word in SMALLER_IS_BETTER)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _metric_first(names: Mapping[str, float]) -> str | None:
    return next((name for name in names if "loss" not in name), next(iter(names), None))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it exists, but belongs to another user
    return True


_STAT_STATE, _STAT_START = 0, 19  # fields of /proc/<pid>/stat, counted after the name


def born(pid: int) -> str:
    """Return boot id and start time of a process; empty if it is dead or there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[_STAT_STATE] in "ZX" else f"{boot}/{fields[_STAT_START]}"
