"""Echelon from Python: `echelon.train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.cluster.start import start
from echelon.core.config import job_from
from echelon.core.interfaces import Observer, Task
from echelon.loop import PYTHON_TASK, KnownRun, Result, check_resume, load_run, rearranged
from echelon.strategy import check as check_strategy
from echelon.task import anchored, check_python, load_task
from echelon.task import check as check_task
from echelon.track import progress


def train(
    task: Task | str,
    *,
    strategy: str | None = None,
    workers: int | None = None,
    resume: str | None = None,
    quiet: bool = False,
    observers: Sequence[Observer] = (),
    **settings: Any,
) -> Result:
    """Train a task and return what came of it.

    `task` is a `Task`, the name of a built-in one, or `path/to/file.py:function`. `settings` are
    the keys of a job: `epochs=3, batch_size=64, optimizer={"name": "adamw", "lr": 3e-4}`, …
    `observers` see the run go by in the process that records it: with several workers that is one
    of them, and what observers keep in lists stays there.
    `resume` continues an earlier run of the same task; what `settings` do not say is then as
    it was.
    """
    given = {"strategy": strategy, "workers": workers}
    known: KnownRun | None = None
    values = dict(settings)
    if resume is not None:
        known = load_run((settings.get("track") or {}).get("folder", "runs"), resume)
        values = _merged(known.job.model_dump(mode="json"), settings)
    said = {key: value for key, value in given.items() if value is not None}
    if known is not None:
        forgotten = rearranged(settings | said)
        values |= forgotten | {k: settings[k] for k in settings if k in ("mesh", *forgotten)}
    values |= said
    if isinstance(task, Task):
        job = job_from(values | {"task": PYTHON_TASK}, checks=[check_strategy, check_python])
    else:
        job = job_from(values | {"task": task}, checks=[check_strategy, check_task])
        job = anchored(job, Path())
        task = load_task(job)
    if known is not None:
        check_resume(known, job)
    watchers = [*observers, progress(quiet=quiet)]
    return start(job, task, resume=known.id if known else None, observers=watchers)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` goes before `base`, key by key."""
    return base | {
        key: _merged(base[key], value)
        if isinstance(value, dict) and isinstance(base.get(key), dict)
        else value
        for key, value in over.items()
    }
