"""A run and its task again, for the verbs that use a trained model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from echelon import strategy, task
from echelon.core.config import DataSection, Job
from echelon.core.errors import ConfigError, RunError, unknown
from echelon.core.task import Task
from echelon.loop import PYTHON_TASK, KnownRun, load_run

_MAY_CHANGE = ("data", "device", "evaluate", "threads")
_ORIGIN = ("data.name", "data.path")


def check_stored(job: Job) -> None:
    """The config of a run was checked when it began, but files can be damaged."""
    strategy.check(job)
    if job.task != PYTHON_TASK:
        task.check(job)


def stored_run(folder: str, run: str, overrides: list[str] | None = None) -> KnownRun:
    """A run whose task can be built again."""
    known = load_run(folder, run, overrides or [], checks=[check_stored])
    if known.job.task == PYTHON_TASK:
        raise RunError(f"run {known.id!r} was started from Python: its task is not known here")
    return known


def reopen(folder: str, run: str, overrides: list[str]) -> tuple[KnownRun, Task]:
    """With other data than the run's own, all of it is held out and nothing is fitted to it."""
    keys = [text.partition("=")[0] for text in overrides]
    for key in keys:
        if key.partition(".")[0] not in _MAY_CHANGE:
            raise ConfigError("here, " + unknown("setting", key, _MAY_CHANGE))
    own = stored_run(folder, run)
    if any(key in _ORIGIN for key in keys):
        changed = stored_run(folder, run, [*_nowhere(own), *overrides])
        if _other_data(own, changed):
            return changed, task.load_task(changed.job, changed.fitted)
    known = stored_run(folder, run, overrides)
    if _other_data(own, known):
        return known, task.load_task(known.job, known.fitted)
    _refuse_other_split(own.job.data, known.job.data)
    return known, task.load_task(known.job)


def reopen_on(known: KnownRun, path: Path) -> tuple[KnownRun, Task]:
    """The run and its task on the data at `path`, whatever that is called, without answers."""
    place: dict[str, Any] = {"path": str(path), "name": None, "valid_path": None}
    if known.job.data.name is not None:
        place["options"] = {}  # those of a shipped set mean nothing to a file
    data = known.job.data.model_copy(update=place)
    known = dataclasses.replace(known, job=known.job.model_copy(update={"data": data}))
    # A label that the model does not know is no obstacle to saying what it should be.
    unasked = {"target": None} if "target" in known.fitted else {}
    return known, task.load_task(known.job, {**known.fitted, **unasked})


def _nowhere(own: KnownRun) -> list[str]:
    """Other data goes in the place of the run's own, not beside it."""
    options = ["data.options={}"] if own.job.data.name is not None else []
    return ["data.name=null", "data.path=null", "data.valid_path=null", *options]


def _other_data(own: KnownRun, known: KnownRun) -> bool:
    one, other = own.job.data, known.job.data
    return (one.name, one.path) != (other.name, other.path)


def _refuse_other_split(own: DataSection, given: DataSection) -> None:
    """Cut or read in another way, the held-out part would hold samples that were trained on."""
    for key in DataSection.model_fields:
        if key != "prefetch" and getattr(own, key) != getattr(given, key):
            raise ConfigError(
                f"data.{key} cannot change on the data the run was trained on: its held-out part "
                f"would not be the same; give other data with it (data.path=…)"
            )
