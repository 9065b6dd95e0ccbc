"""Where a run takes place, and how another process joins it.

`echelon train` and `echelon.train` call `start`, which chooses the processes of a run:

    started by torchrun                          this process is one member of a fixed group
    strategy of a single process                 train right here, without a group
    one worker, no servers, not elastic          train right here, in a group of one
    members that can do without each other       `launch_elastic`: coordinator, servers if the
                                                 strategy has any, and members that may come and go
    all others                                   fork a fixed group of members (`launch`)

`join` makes this process a member of an elastic run that is under way.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon import strategy
from echelon import task as tasks
from echelon.cluster.coordinator import Settings, join_string, read_join_string
from echelon.cluster.elastic_group import ElasticGroup
from echelon.cluster.environment import beside, joined
from echelon.cluster.health import MemberFailed
from echelon.cluster.services import Fleet, Keeper, Office, check_addresses
from echelon.cluster.supervisor import facts_of, launch, steps_of
from echelon.cluster.workers import Member
from echelon.comm.group import Group
from echelon.comm.peers import Place
from echelon.core.config import Job, job_from
from echelon.core.errors import ConfigError, EchelonError, Left, PeerError, RunError, TrainingError
from echelon.core.interfaces import Observer, Task
from echelon.data.journal import JOURNAL, Journal
from echelon.loop import PYTHON_TASK, Result, assist, begin, run_job, take_part
from echelon.loop.build import numerics, parallel
from echelon.loop.inference import final_model
from echelon.optim import build_schedule
from echelon.task import prepare
from echelon.track import Store
from echelon.track.records import Status

JOIN = "join"
"""The file in a run's folder that holds its join string."""
_KEY_BYTES = 32
_DEADLINE = 30.0
"""Seconds without a message from the coordinator after which a joined member gives up."""


def start(
    job: Job, task: Task, *, resume: str | None = None, observers: Sequence[Observer] = ()
) -> Result:
    """Train `task` as configured in `job`, with `job.workers` members."""
    place = joined(deadline=job.sync.deadline)
    if place is not None and (place.count > 1 or job.workers > 1):
        return _under_torchrun(_for_torchrun(job, place.count), task, place, resume, observers)
    if not strategy.arrangement(job):
        return run_job(job, task, resume=resume, observers=observers)
    if job.workers == 1 and not strategy.has_servers(job) and not job.elastic.enabled:
        with closing(Group(Place(0, 1, deadline=job.sync.deadline))) as alone:
            return run_job(job, task, comm=alone, resume=resume, observers=observers)
    if strategy.can_do_without(job):
        return _start_elastic(job, task, resume, observers)
    return _start_fixed(job, task, resume, observers)


# A group of a fixed size: processes that torchrun started, or processes forked here.


def _under_torchrun(
    job: Job, task: Task, place: Place, resume: str | None, observers: Sequence[Observer]
) -> Result:
    """Train as one of the processes that torchrun started; the first of them records the run."""
    local, count = beside()
    take_gpu(job, local)
    with closing(Group(place)) as group:
        if place.index > 0:
            return assist(job, task, group, resume=resume, beside=count)
        return run_job(job, task, comm=group, resume=resume, observers=observers, beside=count)


def _for_torchrun(job: Job, count: int) -> Job:
    """Return `job` with the number of workers that torchrun started; refuse what cannot work."""
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


def _start_fixed(job: Job, task: Task, resume: str | None, observers: Sequence[Observer]) -> Result:
    """Fork a fixed group of members. Member 0 sends its summary back; the model is read from disk.

    If the members fail, this process writes the failure into the run's record.
    """

    def work(member: Member) -> Mapping[str, Any]:
        take_gpu(job, member.place.index)
        group = Group(member.place)
        group.pulse, group.watched = member.pulse, True
        if member.place.index > 0:
            assist(job, task, group, resume=resume)
            return {}
        watchers = [*observers, _RunReporter(member)]
        return run_job(job, task, comm=group, resume=resume, observers=watchers).summary()

    _import_strategy(job)
    try:
        found = launch(job.workers, work, deadline=job.sync.deadline)
    except BaseException as error:
        _note_failure(job, error)
        raise
    return _result_of(found, final_model(job, task, Path(found["folder"])))


def _import_strategy(job: Job) -> None:
    """Import the strategy before the fork: parts of torch take seconds, once instead of N times."""
    cpu = torch.device("cpu")
    schedule = build_schedule(job.schedule, 1)
    strategy.build(job.strategy, numerics(job, cpu), schedule, None, parallel(job))


class _RunReporter:
    """An observer that sends the run's name to the supervisor, for `_note_failure`."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def started(self, run: str, facts: Mapping[str, Any]) -> None:  # noqa: ARG002
        self._member.tell(run=run)

    def progressed(self, step: int, values: Mapping[str, float]) -> None: ...

    def logged(self, step: int, values: Mapping[str, float]) -> None: ...

    def evaluated(self, step: int, values: Mapping[str, float]) -> None: ...

    def noticed(self, step: int, message: str) -> None: ...

    def finished(self, status: str, summary: Mapping[str, Any]) -> None: ...


def _note_failure(job: Job, error: BaseException) -> None:
    """Record how a run failed.

    The member that records the run may have been killed before it could do so, or may have seen
    only a consequence of the failure.
    """
    run, message = facts_of(error).get("run"), str(error) or type(error).__name__
    if run is None:
        return
    status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    with suppress(EchelonError, OSError):  # the caller raises the failure itself: do not hide it
        store = Store(job.track.folder)
        known = store.run(run)
        steps = max(known.step, steps_of(error))
        store.add_event(run, steps, message)
        summary = {**known.summary, "run": run, "steps": steps, "error": message}
        store.finish(run, status, summary)
        if isinstance(error, MemberFailed) and error.traceback is not None:
            (known.folder / "error.txt").write_text(error.traceback, encoding="utf-8")


def _result_of(found: Mapping[str, Any], model: nn.Module) -> Result:
    """Build a result from a summary that came through a pipe as JSON (null stands for NaN)."""
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


# An elastic run: it outlives its members, and others may join.


def _start_elastic(
    job: Job, task: Task, resume: str | None, observers: Sequence[Observer]
) -> Result:
    """Start an elastic run. The run is recorded before its members start: any of them may fail."""
    check_addresses(job)
    _import_strategy(job)
    run = begin(job, task, resume=resume)
    try:
        found = launch_elastic(job, task, run, resume=resume is not None, observers=observers)
    except BaseException as error:
        vars(error).setdefault("facts", {})["run"] = run
        _note_failure(job, error)
        raise
    return _result_of(found, final_model(job, task, Path(found["folder"])))


def launch_elastic(
    job: Job, task: Task, run: str, *, resume: bool, observers: Sequence[Observer]
) -> dict[str, Any]:
    """Run coordinator, servers and members of an elastic run; return the run's summary.

    The run outlives each of its members, and more may join while it lasts.
    """
    store = Path(job.track.folder).resolve()
    folder, samples, key = store / run, len(prepare(task).train), secrets.token_bytes(_KEY_BYTES)
    about: dict[str, Any] = {"run": run, "store": str(store), "job": job.model_dump(mode="json")}
    _journal_beginning(folder / JOURNAL, job, run, samples)
    with ExitStack() as last:
        fleet = None
        if strategy.has_servers(job):
            fleet = last.enter_context(closing(Fleet(job, key, folder / JOURNAL)))
            about["servers"] = [asdict(shard) for shard in fleet.addresses]
        office = Office(_settings(job, key, samples, about), folder / JOURNAL, job.elastic.address)
        keeper = last.enter_context(closing(Keeper(office)))
        address = (job.elastic.address, keeper.port)

        def work(member: Member) -> Mapping[str, Any]:
            take_gpu(job, member.place.index)
            group = _group(job, address, key, member)
            with member_of(group, fatal=True) as results:
                result = take_part(
                    job,
                    task,
                    group,
                    run=run,
                    store=store,
                    resume=resume,
                    observers=observers,
                    newcomer=not group.met,
                )
                results.append(result)
                return {**result.summary(), "led": group.index == 0}

        last.enter_context(_join_file(folder / JOIN, join_string(*address, key)))
        found = launch(job.workers, work, deadline=job.sync.deadline, keeper=keeper, fleet=fleet)
    return found or _stored_summary(store, run)


def _journal_beginning(path: Path, job: Job, run: str, samples: int) -> None:
    with Journal(path) as journal:
        journal.add(
            "begun",
            run=run,
            samples=samples,
            batch_size=job.batch_size,
            seed=job.seed,
            workers=job.workers,
        )


def _settings(job: Job, key: bytes, samples: int, about: dict[str, Any]) -> Settings:
    return Settings(
        key=key,
        expected=job.workers,
        min_workers=job.elastic.min_workers,
        wait=job.elastic.wait,
        samples=samples,
        run=about,
    )


@contextmanager
def _join_file(path: Path, text: str) -> Iterator[None]:
    """Keep the join string in a file that only its owner can read, until the run ends."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, text.encode() + b"\n")
    finally:
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _group(job: Job, address: tuple[str, int], key: bytes, member: Member) -> ElasticGroup:
    return ElasticGroup(
        address,
        key,
        name=f"worker {member.place.index}",
        number=member.place.index,
        deadline=job.sync.deadline,
        pulse=member.pulse,
    )


def _stored_summary(store: Path, run: str) -> dict[str, Any]:
    """Return the stored summary of a run that members from elsewhere have finished."""
    found = Store(store).run(run).summary
    if "folder" not in found:
        raise TrainingError(f"run {run!r} is done, but how is not on record in {store}")
    return dict(found)


def join(text: str, *, observers: Sequence[Observer] = ()) -> Result:
    """Take part in a run until it ends. `text` is its join string, or its folder on this machine.

    Raise `Left` if a signal asks this process to end; the run goes on without it.
    """
    host, port, key = read_join_string(_join_string_of(text))
    group = ElasticGroup((host, port), key, name="joined", number=None, deadline=_DEADLINE)
    with member_of(group, fatal=False) as results:
        about = group.run
        job = job_from(about["job"], checks=[strategy.check])
        task = tasks.load_task(_joinable(job))
        result = take_part(
            job,
            task,
            group,
            run=about["run"],
            store=Path(about["store"]),
            observers=observers,
            newcomer=True,
            guest=True,
        )
        results.append(result)
        return result


@contextmanager
def member_of(group: ElasticGroup, *, fatal: bool) -> Iterator[list[Result]]:
    """Report to the coordinator how the work inside ended, whether it returns or raises.

    The body appends its result to the list it gets. With `fatal`, an error ends the run for all.
    """
    results: list[Result] = []
    try:
        yield results
        group.leave(results[0].status, over=True)
    except Left as error:
        with suppress(PeerError):
            group.leave(str(error))
        raise
    except BaseException as error:
        with suppress(PeerError):
            group.leave(_reason(error), fatal=fatal)
        raise
    finally:
        group.end()


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped at once by a signal"
    return f"{type(error).__name__}: {error}"


def _join_string_of(text: str) -> str:
    """Return the join string: `text` itself, or the one kept in the run's folder."""
    if "://" in text:
        return text
    path = Path(text) / JOIN
    if not path.is_file():
        raise RunError(
            f"{text!r} is neither a join string (echelon://HOST:PORT/KEY) nor the folder of a run "
            f"that can be joined: there is no {path}"
        )
    return path.read_text(encoding="ascii").strip()


def _joinable(job: Job) -> Job:
    if job.task == PYTHON_TASK:
        raise RunError("this run was started from Python: its task is not known to other processes")
    return job


# Each member's own GPU.


def take_gpu(job: Job, local: int) -> None:
    """Make GPU number `local` the current one; `local` counts the members of this machine.

    Call it in the member's process: CUDA does not survive a fork, so the parent must not touch it.
    """
    found = torch.cuda.device_count()
    if found == 0 or not job.device.startswith(("auto", "cuda")):
        return
    if ":" in job.device:
        raise ConfigError(
            f"device {job.device!r} is one GPU, and {job.workers} members need one each: "
            f"write device: cuda",
            ("device",),
        )
    if local >= found:
        raise ConfigError(
            f"member {local} of this machine has no GPU of its own, for there are {found}: "
            f"use fewer workers, or device: cpu",
            ("workers",),
        )
    torch.cuda.set_device(local)
