"""A run on this machine that outlives its members: each is dispensable, and others may join."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echelon import strategy
from echelon.cluster.coordinator import Settings, join_string
from echelon.cluster.elastic_group import ElasticGroup
from echelon.cluster.fleet import Fleet
from echelon.cluster.gpu import take_gpu
from echelon.cluster.joining import JOIN, member_of
from echelon.cluster.keeper import Keeper, Office
from echelon.cluster.launch import launch
from echelon.cluster.member import Member
from echelon.core.config import Job
from echelon.core.errors import TrainingError
from echelon.core.interfaces import Observer, Task
from echelon.data.journal import JOURNAL, Journal
from echelon.loop import take_part
from echelon.task import prepare
from echelon.track import Store

_KEY_BYTES = 32


def launch_elastic(
    job: Job, task: Task, run: str, *, resume: bool, observers: Sequence[Observer]
) -> dict[str, Any]:
    """Members, and a coordinator that sees to it that they find each other; returns a summary."""
    store = Path(job.track.folder).resolve()
    folder, samples, key = store / run, len(prepare(task).train), secrets.token_bytes(_KEY_BYTES)
    about: dict[str, Any] = {"run": run, "store": str(store), "job": job.model_dump(mode="json")}
    _note_beginning(folder / JOURNAL, job, run, samples)
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

        last.enter_context(_invitation(folder / JOIN, join_string(*address, key)))
        found = launch(job.workers, work, deadline=job.sync.deadline, keeper=keeper, fleet=fleet)
    return found or _recorded(store, run)


def _note_beginning(path: Path, job: Job, run: str, samples: int) -> None:
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


def _group(job: Job, address: tuple[str, int], key: bytes, member: Member) -> ElasticGroup:
    return ElasticGroup(
        address,
        key,
        name=f"worker {member.place.index}",
        number=member.place.index,
        deadline=job.sync.deadline,
        pulse=member.pulse,
    )


def _recorded(store: Path, run: str) -> dict[str, Any]:
    """The summary of a run that was brought to its end by members who joined it."""
    found = Store(store).run(run).summary
    if "folder" not in found:
        raise TrainingError(f"run {run!r} is done, but how is not on record in {store}")
    return dict(found)


@contextmanager
def _invitation(path: Path, text: str) -> Iterator[None]:
    """The join string, for whoever may read the owner's files; gone when the run is."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, text.encode() + b"\n")
    finally:
        os.close(handle)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
