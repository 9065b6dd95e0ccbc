"""From a job to a task whose parts are ready to train."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from echelon.core.config import Job
from echelon.core.errors import ConfigError, unknown
from echelon.core.task import Task
from echelon.task.choice import model_choice
from echelon.task.idle import refuse_idle, refuse_misfit

NAMES = ("classify", "click_rate", "language_model", "regress", "text_classify")


def check(job: Job) -> None:
    """Refuse at once what could only fail later. Needs no torch."""
    if ":" in job.task:
        if job.model:
            raise ConfigError("model is chosen by the task's own file: remove it", ("model",))
        return
    if job.task not in NAMES:
        hint = (
            ""
            if "/" not in job.task and not job.task.endswith(".py")
            else ("; a task of your own is path/to/file.py:function")
        )
        raise ConfigError(unknown("task", job.task, NAMES) + hint, ("task",))
    from echelon import models

    models.options(*model_choice(job))
    refuse_misfit(job)
    refuse_idle(job)
    if job.data.name is None and job.data.path is None:
        raise ConfigError(
            f"task {job.task!r} needs data: set data.name (a shipped set) or data.path", ("data",)
        )


def anchored(job: Job, folder: Path) -> Job:
    """A task file is looked for beside the job's own file first; its path is made absolute."""
    if ":" not in job.task:
        return job
    path, _, function = job.task.rpartition(":")
    beside = folder / path
    found = beside if beside.is_file() else Path(path)
    return job.model_copy(update={"task": f"{found.resolve()}:{function}"})


def load_task(job: Job, fitted: dict[str, Any] | None = None) -> Task:
    """Build the job's task; with `fitted`, on new data but as it was learnt before."""
    if ":" in job.task:
        from echelon.task.from_file import load_from_file

        return load_from_file(job, other_data=fitted is not None)
    from echelon.task.builtin import BUILT_IN

    return BUILT_IN[job.task](job, fitted)


def prepare(task: Task) -> Task:
    """Turn whatever the user gave into what the loop works on."""
    from echelon.data.sources import as_source
    from echelon.task.kinds import check_kinds
    from echelon.task.metrics import as_metrics

    check_kinds(task)
    return dataclasses.replace(
        task,
        train=None if task.train is None else as_source(task.train),
        valid=None if task.valid is None else as_source(task.valid),
        metrics=as_metrics(task.metrics),
    )
