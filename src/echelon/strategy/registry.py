"""Strategies by name: a new one is one file and one row."""

from __future__ import annotations

import importlib

from echelon.core.config import Job
from echelon.core.errors import ConfigError, unknown
from echelon.core.protocols import Inspector, Schedule, Strategy
from echelon.core.types import Numerics

_ROWS = {
    "single": "echelon.strategy.single:Single",
}


def names() -> list[str]:
    return sorted(_ROWS)


def check(job: Job) -> None:
    """Refuse a strategy that does not exist or cannot run with these workers."""
    if job.strategy not in _ROWS:
        raise ConfigError(unknown("strategy", job.strategy, _ROWS), ("strategy",))
    if job.strategy == "single" and job.workers != 1:
        raise ConfigError(
            f"workers = {job.workers}: strategy 'single' is one process", ("workers",)
        )


def build(
    name: str, numerics: Numerics, schedule: Schedule, inspector: Inspector | None = None
) -> Strategy:
    """A strategy, not yet set up."""
    module, _, cls = _ROWS[name].partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), cls)(
        numerics, schedule, inspector
    )
    return strategy
