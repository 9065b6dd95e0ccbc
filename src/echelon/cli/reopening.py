"""A run and its task again, for the verbs that use a trained model."""

from __future__ import annotations

from echelon import strategy
from echelon.core.errors import RunError
from echelon.core.task import Task
from echelon.loop import PYTHON_TASK, KnownRun, load_run
from echelon.task import load_task

_DATA = ("data.path=", "data.name=")


def reopen(folder: str, run: str, overrides: list[str]) -> tuple[KnownRun, Task]:
    """With other data than the run's own, all of it is held out and nothing is fitted to it."""
    other_data = any(text.startswith(_DATA) for text in overrides)
    if other_data:
        overrides = ["data.valid_path=null", "data.name=null", *overrides]
    known = load_run(folder, run, overrides, checks=[strategy.check])
    if known.job.task == PYTHON_TASK:
        raise RunError(f"run {known.id!r} was started from Python: its task is not known here")
    return known, load_task(known.job, known.fitted if other_data else None)
