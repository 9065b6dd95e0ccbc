"""`echelon.train`: train from Python.

Keywords become a checked `Job`, exactly as a job file does, and `cluster.start` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.cluster.start import start
from echelon.core.config import job_from
from echelon.core.errors import Interrupted
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
    """Train a task and return the result.

    `task` is a `Task`, the name of a built-in one, or `path/to/file.py:function`. `settings` are
    the keys of a job: `epochs=3, batch_size=64, optimizer={"name": "adamw", "lr": 3e-4}`, …
    `observers` receive the events of the run in the process that records it. With several workers
    that is one of the workers, and data that observers collect stays in that process.
    `resume` continues an earlier run of the same task; settings that are not given keep the values
    of that run.

    A signal raises `Interrupted`, which is a KeyboardInterrupt, after a last checkpoint.
    """
    known: KnownRun | None = None
    values = dict(settings)
    if resume is not None:
        known = load_run((settings.get("track") or {}).get("folder", "runs"), resume)
        values = _merged(known.job.model_dump(mode="json"), settings)
    given = {"strategy": strategy, "workers": workers}
    given = {key: value for key, value in given.items() if value is not None}
    if known is not None:
        # Another strategy or number of workers: the earlier run's mesh and strategy sections do
        # not apply any more, unless `settings` has them too.
        forgotten = rearranged(settings | given)
        values |= forgotten | {k: settings[k] for k in settings if k in ("mesh", *forgotten)}
    values |= given
    if isinstance(task, Task):
        job = job_from(values | {"task": PYTHON_TASK}, checks=[check_strategy, check_python])
    else:
        job = job_from(values | {"task": task}, checks=[check_strategy, check_task])
        job = anchored(job, Path())
        task = load_task(job)
    if known is not None:
        check_resume(known, job)
    watchers = [*observers, progress(quiet=quiet)]
    result = start(job, task, resume=known.id if known else None, observers=watchers)
    if result.status == "stopped":
        raise Interrupted(
            f"{result.reason} after {result.steps:,} steps; continue with resume={result.run!r}",
            result,
        )
    return result


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `over` put in, key by key and in nested mappings too."""
    return base | {
        key: _merged(base[key], value)
        if isinstance(value, dict) and isinstance(base.get(key), dict)
        else value
        for key, value in over.items()
    }
