"""Runs as plain data, and what is different between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echelon.track.records import Run

Rows = dict[str, list[Any]]
"""A name and one value per run; None where a run has none."""


def as_data(run: Run) -> dict[str, Any]:
    """A run for `--json`; config and facts are left to those who ask for one run."""
    return {
        "run": run.id,
        "status": run.status,
        "task": run.task,
        "strategy": run.strategy,
        "steps": run.steps,
        "samples": run.summary.get("samples"),
        "seconds": round(run.seconds, 3),
        "metrics": run.metrics,
        "best": run.best._asdict() if run.best is not None else None,
        "started": run.started,
        "finished": run.finished,
        "folder": str(run.folder),
    }


def config_differences(runs: Sequence[Run]) -> Rows:
    """Every setting that is not the same in all runs, by its dotted key."""
    flat = [dict(_flattened(run.config)) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = {key: [values.get(key) for values in flat] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def metric_rows(runs: Sequence[Run]) -> Rows:
    """The figures the runs ended with, side by side."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    return {name: [run.metrics.get(name) for run in runs] for name in names}


def _flattened(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value
