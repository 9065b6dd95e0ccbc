"""Where a run takes place: in this process, in several of this machine, or among torchrun's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon import strategy
from echelon.cluster.elastic_start import launch_elastic
from echelon.cluster.environment import beside, joined
from echelon.cluster.gpu import take_gpu
from echelon.cluster.launch import facts_of, launch, steps_of
from echelon.cluster.listening import check_addresses
from echelon.cluster.member import Member
from echelon.cluster.verdict import MemberFailed
from echelon.comm.group import Group
from echelon.comm.peers import Place
from echelon.core.config import Job, job_from
from echelon.core.errors import ConfigError, EchelonError
from echelon.core.interfaces import Observer, Task
from echelon.loop import Result, assist, begin, run_job
from echelon.loop.assemble import numerics, parallel
from echelon.loop.inference import final_model
from echelon.optim import build_schedule
from echelon.track import Store
from echelon.track.store import Status


def start(
    job: Job, task: Task, *, resume: str | None = None, observers: Sequence[Observer] = ()
) -> Result:
    """Train `task` as `job` says, with as many members as it asks for."""
    place = joined(deadline=job.sync.deadline)
    if place is not None and (place.count > 1 or job.workers > 1):
        return _among_others(_fitting(job, place.count), task, place, resume, observers)
    if not strategy.arrangement(job):
        return run_job(job, task, resume=resume, observers=observers)
    if job.workers == 1 and not strategy.has_servers(job) and not job.elastic.enabled:
        with closing(Group(Place(0, 1, deadline=job.sync.deadline))) as alone:
            return run_job(job, task, comm=alone, resume=resume, observers=observers)
    if strategy.can_do_without(job):
        return _elastic(job, task, resume, observers)
    return _launched(job, task, resume, observers)


def _elastic(job: Job, task: Task, resume: str | None, observers: Sequence[Observer]) -> Result:
    """Members that can do without each other. The run is there before they are."""
    check_addresses(job)
    _import_strategy(job)
    run = begin(job, task, resume=resume)
    try:
        found = launch_elastic(job, task, run, resume=resume is not None, observers=observers)
    except BaseException as error:
        vars(error).setdefault("facts", {})["run"] = run
        _note_failure(job, error)
        raise
    return _result(found, final_model(job, task, Path(found["folder"])))


def _among_others(
    job: Job, task: Task, place: Place, resume: str | None, observers: Sequence[Observer]
) -> Result:
    """One of the processes that torchrun started; the first of them records the run."""
    local, count = beside()
    take_gpu(job, local)
    with closing(Group(place)) as group:
        if place.index > 0:
            return assist(job, task, group, resume=resume, beside=count)
        return run_job(job, task, comm=group, resume=resume, observers=observers, beside=count)


def _fitting(job: Job, count: int) -> Job:
    """torchrun says how many members there are."""
    if strategy.has_servers(job):
        raise ConfigError(
            f"torchrun starts trainers only, and strategy {job.strategy!r} has servers too: start "
            f"it with `echelon train`, and trainers of other machines with `echelon join`",
            ("strategy",),
        )
    if not strategy.arrangement(job):
        raise ConfigError(
            f"torchrun started {count} processes, and strategy {job.strategy!r} is one process",
            ("strategy",),
        )
    if job.elastic.enabled:
        raise ConfigError(
            "elastic.enabled has no effect among processes that torchrun started, for it ends all "
            "of them with one: start them with `echelon train`, and others with `echelon join`",
            ("elastic", "enabled"),
        )
    if job.workers not in (1, count):
        raise ConfigError(
            f"workers = {job.workers}, but torchrun started {count} processes", ("workers",)
        )
    return job_from(job.model_dump(mode="json") | {"workers": count}, checks=[strategy.check])


def _launched(job: Job, task: Task, resume: str | None, observers: Sequence[Observer]) -> Result:
    """Members forked from here. What they wrote is what there is to know afterwards."""

    def work(member: Member) -> Mapping[str, Any]:
        take_gpu(job, member.place.index)
        group = Group(member.place)
        group.pulse, group.watched = member.pulse, True
        if member.place.index > 0:
            assist(job, task, group, resume=resume)
            return {}
        told = [*observers, _Teller(member)]
        return run_job(job, task, comm=group, resume=resume, observers=told).summary()

    _import_strategy(job)
    try:
        found = launch(job.workers, work, deadline=job.sync.deadline)
    except BaseException as error:
        _note_failure(job, error)
        raise
    return _result(found, final_model(job, task, Path(found["folder"])))


def _import_strategy(job: Job) -> None:
    """Once here rather than in every member: torch's engines take seconds to import."""
    cpu = torch.device("cpu")
    schedule = build_schedule(job.schedule, 1)
    strategy.build(job.strategy, numerics(job, cpu), schedule, None, parallel(job))


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
    """The member that records may have been ended before it could, or known a consequence only."""
    run, message = facts_of(error).get("run"), str(error) or type(error).__name__
    if run is None:
        return
    status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    with suppress(EchelonError, OSError):  # the failure itself is what has to be told
        store = Store(job.track.folder)
        known = store.run(run)
        steps = max(known.step, steps_of(error))
        store.add_event(run, steps, message)
        summary = {**known.summary, "run": run, "steps": steps, "error": message}
        store.finish(run, status, summary)
        if isinstance(error, MemberFailed) and error.traceback is not None:
            (known.folder / "error.txt").write_text(error.traceback, encoding="utf-8")


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
        nodes=found.get("nodes", {}),
    )
