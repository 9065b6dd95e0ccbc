"""The config and the fitted values in a run's folder: written when it starts, read to use it again.

`keep` writes both files. `load_run` finds an earlier run and returns it as a `KnownRun`, with the
job as it was or with other settings. `check_resume` and `refuse_other_data` make sure that a run
is only resumed with the model, the optimizer and the data with which it began.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from echelon import strategy
from echelon.core.config import Job, load_job
from echelon.core.errors import RunError
from echelon.core.files import write_atomic
from echelon.core.interfaces import Task
from echelon.track import Store

CONFIG = "config.yaml"
FITTED = "fitted.json"
PYTHON_TASK = "python"
"""The task name of a run that was started with a `Task` from Python."""
_FIXED = ("task", "args", "seed", "model", "optimizer")


@dataclass(frozen=True, slots=True)
class KnownRun:
    """An earlier run: its folder, its job, and the values that were fitted to its data."""

    id: str
    folder: Path
    job: Job
    fitted: dict[str, Any]


def load_run(
    folder: str | Path,
    run: str,
    overrides: Sequence[str] = (),
    *,
    checks: Sequence[Callable[[Job], None]] = (),
) -> KnownRun:
    """Find a run by its id, the beginning of its id, or `last`."""
    found = Store(folder).run(run)
    config = found.folder / CONFIG
    if not config.is_file():
        raise RunError(f"run {found.id!r} never began to train: there is no {config}")
    forgotten = rearranged({key: value for key, _, value in (t.partition("=") for t in overrides)})
    reset = [f"{key}={value}" for key, value in forgotten.items()]
    job = load_job(config, [*reset, *overrides], checks=checks).job
    return KnownRun(found.id, found.folder, job, read_fitted(found.folder))


def rearranged(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings to reset before a run is resumed with the settings `given`.

    A new strategy or number of workers makes the old mesh and the old strategy's section void.
    """
    forgotten: dict[str, Any] = {}
    if "mesh" not in given and {"strategy", "workers"} & set(given):
        forgotten["mesh"] = {}
    if "strategy" in given:
        forgotten |= {name: {} for name in strategy.sections() if name != given["strategy"]}
    if "workers" not in given and "mesh" in given:
        forgotten["workers"] = 1
    return forgotten


def check_resume(known: KnownRun, job: Job) -> None:
    """Refuse to resume with another task, seed, model or optimizer than the run began with."""
    began = load_job(known.folder / CONFIG).job.model_dump(mode="json")
    given = job.model_dump(mode="json")
    for key in _FIXED:
        if found := _difference(key, began[key], given[key]):
            name, was, now = found
            raise RunError(
                f"run {known.id!r} began with {name} = {was!r}: it cannot go on with {now!r}"
            )


def _difference(name: str, was: Any, now: Any) -> tuple[str, Any, Any] | None:
    """Return the first setting that differs: its dotted name and both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        pairs = [(f"{name}.{key}", was.get(key), now.get(key)) for key in was | now]
        return next(filter(None, (_difference(*pair) for pair in pairs)), None)
    return None if was == now else (name, was, now)


def keep(folder: Path, job: Job, task: Task) -> None:
    """Write the resolved config and the values fitted to the data into the run's folder."""
    text = yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_atomic(folder / CONFIG, text)
    write_atomic(folder / FITTED, json.dumps(dict(task.fitted), ensure_ascii=False))


def read_fitted(folder: Path) -> dict[str, Any]:
    """Read the values that a run fitted to its data, such as vocabulary and label names."""
    path = folder / FITTED
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it must hold one JSON object")
    return found


def refuse_other_data(task: Task, folder: Path) -> None:
    """Refuse to resume a run with data from which other values are fitted than at its start."""
    if json.loads(json.dumps(dict(task.fitted))) != read_fitted(folder):
        raise RunError(f"run {folder.name!r} began with other data: labels or statistics differ")
