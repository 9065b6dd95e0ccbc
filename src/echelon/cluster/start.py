"""Where a run takes place: in this process, in several of this machine, or among torchrun's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from echelon import strategy
from echelon.cluster.environment import joined
from echelon.cluster.launch import Member, facts_of, launch
from echelon.comm.group import Group
from echelon.comm.place import Place
from echelon.core.config import Job, job_from
from echelon.core.errors import ConfigError, EchelonError
from echelon.core.protocols import Observer
from echelon.core.task import Task
from echelon.loop import Result, assist, run_job
from echelon.loop.inference import final_model
from echelon.track import Store


def start(
    job: Job, task: Task, *, resume: str | None = None, observers: Sequence[Observer] = ()
) -> Result:
    """Train `task` as `job` says, with as many members as it asks for."""
    place = joined(deadline=job.sync.deadline)
    if place is not None and (place.count > 1 or job.workers > 1):
        return _among_others(_fitting(job, place.count), task, place, resume, observers)
    if not strategy.arrangement(job):
        return run_job(job, task, resume=resume, observers=observers)
    if job.workers == 1:
        alone = Group(Place(0, 1, deadline=job.sync.deadline))
        return run_job(job, task, comm=alone, resume=resume, observers=observers)
    return _launched(job, task, resume, observers)


def _among_others(
    job: Job, task: Task, place: Place, resume: str | None, observers: Sequence[Observer]
) -> Result:
    """One of the processes that torchrun started; the first of them records the run."""
    group = Group(place)
    if place.index == 0:
        return run_job(job, task, comm=group, resume=resume, observers=observers)
    return assist(job, task, group, resume=resume)


def _fitting(job: Job, count: int) -> Job:
    """torchrun says how many members there are."""
    if not strategy.arrangement(job):
        raise ConfigError(
            f"torchrun started {count} processes, and strategy {job.strategy!r} is one process",
            ("strategy",),
        )
    if job.workers not in (1, count):
        raise ConfigError(
            f"workers = {job.workers}, but torchrun started {count} processes", ("workers",)
        )
    return job_from(job.model_dump(mode="json") | {"workers": count}, checks=[strategy.check])


def _launched(job: Job, task: Task, resume: str | None, observers: Sequence[Observer]) -> Result:
    """Members forked from here. What they wrote is what there is to know afterwards."""

    def work(member: Member) -> Mapping[str, Any]:
        group = Group(member.place)
        group.pulse, group.watched = member.pulse, True
        if member.place.index > 0:
            assist(job, task, group, resume=resume)
            return {}
        told = [*observers, _Teller(member)]
        return run_job(job, task, comm=group, resume=resume, observers=told).summary()

    try:
        found = launch(job.workers, work, deadline=job.sync.deadline)
    except BaseException as error:
        _note_failure(job, error)
        raise
    return _result(found, final_model(job, task, Path(found["folder"])))


class _Teller:
    """Lets the supervisor know which run it is, should it have to write down how it ended."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def started(self, run: str, facts: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._member.tell(run=run)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """Of no interest."""

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Of no interest."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Of no interest."""

    def noticed(self, step: int, message: str) -> None:
        """Of no interest."""

    def finished(self, status: str, summary: Mapping[str, Any]) -> None:
        """Of no interest."""


def _note_failure(job: Job, error: BaseException) -> None:
    """The member that records may have been ended before it could; or it named a consequence."""
    run = facts_of(error).get("run")
    if run is None:
        return
    stopped = isinstance(error, KeyboardInterrupt)
    with suppress(EchelonError):  # the failure itself is what has to be told
        store = Store(job.track.folder)
        known = store.run(run)
        message = str(error) or type(error).__name__
        store.add_event(run, known.step, message)
        summary = {**known.summary, "run": run, "steps": known.step, "error": message}
        store.finish(run, "stopped" if stopped else "failed", summary)


def _result(found: Mapping[str, Any], model: nn.Module) -> Result:
    """A summary that came through a pipe, as a result again."""
    return Result(
        run=found["run"],
        status=found["status"],
        reason=found["reason"],
        steps=found["steps"],
        samples=found["samples"],
        seconds=found["seconds"],
        metrics={n: math.nan if v is None else v for n, v in found["metrics"].items()},
        best=found["best"],
        folder=Path(found["folder"]),
        report=Path(found["report"]) if found["report"] else None,
        model=model,
    )
