"""Drive one member of a run, from the job to the report.

Members of a fixed group call `run_job` (the first one, which records the run) or `assist` (the
others). In an elastic group `begin` finds or creates the run before there are members, and every
member calls `take_part`: whichever is first in the present generation leads. The leader records the
run, notifies the observers and writes the checkpoints; the others make the same steps silently
until one of them becomes the first.

    prepare, check ─▶ assemble ─▶ create the run, or load its checkpoint ─▶ record, observe
    ─▶ `trained`: train ─▶ samples for the report ─▶ `Result`
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.checkpoint import state as randomness
from echelon.checkpoint.store import CHECKPOINTS
from echelon.comm import Alone
from echelon.comm.peers import is_torn
from echelon.core.config import Job
from echelon.core.errors import CheckpointError, EchelonError, Left, PeerError
from echelon.core.files import write_atomic
from echelon.core.format import warn
from echelon.core.interfaces import Comm, Observer, Strategy, Task
from echelon.loop.build import assemble, check_task, facts, set_up
from echelon.loop.inference import final_model, gallery
from echelon.loop.interrupt import on_interrupt
from echelon.loop.journal import journalled
from echelon.loop.known_run import keep, refuse_other_data
from echelon.loop.recovery import save_last_words
from echelon.loop.run import Run
from echelon.loop.train import train
from echelon.task import prepare
from echelon.track import Observers, Recorder, Store, exporter, try_report
from echelon.track.exporters import check_exporters

EVALUATION = "evaluation.json"


# A fixed group of members: the first one records the run, the others assist


def run_job(
    job: Job,
    task: Task,
    *,
    comm: Comm | None = None,
    resume: str | None = None,
    observers: Sequence[Observer] = (),
    beside: int | None = None,
) -> Result:
    """Train `task` as `job` says and record it, from the start or from where run `resume` ended.

    Only the first member calls this; the others call `assist`. `beside` is the number of members
    that share this machine's cores, by default all.
    """
    task = prepare(task)
    comm = comm or Alone()
    assert comm.index == 0, f"member {comm.index} is to assist"
    check_task(job, task)
    check_exporters(job.track.exporters)
    store = Store(job.track.folder)
    watchers = Observers(observers)
    with threads(job.threads, beside or comm.count):
        run = assemble(job, task, comm, watchers)  # what cannot be built leaves no run behind
        with closing(run.strategy):
            if resume is None:
                run_id = _create(job, task, store)
                run.shelf.folder = store.folder / run_id / CHECKPOINTS
            else:
                run_id = _resumed(run, task, store, resume)
            folder = store.folder / run_id
            with watchers, journalled(run, run_id, folder, resumed=resume is not None):
                watchers.add(Recorder(store, run_id))
                for name in job.track.exporters:
                    watchers.add(exporter(name, folder))
                watchers.started(run_id, facts(job, task, run, folder))
                result = trained(run, task, run_id, folder)
        if result.report is not None:
            try_report(store, run_id)
        return result


def assist(
    job: Job, task: Task, comm: Comm, *, resume: str | None = None, beside: int | None = None
) -> Result:
    """Train as one of the other members: make the same steps and record nothing."""
    task = prepare(task)
    with threads(job.threads, beside or comm.count):
        run = assemble(job, task, comm, Observers(()))
        with closing(run.strategy):
            if resume is not None:
                run.shelf.folder = Store(job.track.folder).folder / resume / CHECKPOINTS
                run.load(run.shelf.load("last"))
            with on_interrupt(run.interrupt):
                run.begin()
                reason = train(run)
            folder = run.shelf.folder
            return _result(run, "", folder, run.interrupted or reason, run.strategy.model)


def _create(job: Job, task: Task, store: Store) -> str:
    """Create a run in the store, with its folder and config; return its id."""
    run_id = store.create(
        job.name or task.name,
        job.model_dump(mode="json"),
        {"task": task.name, "strategy": job.strategy},
    )
    keep(store.folder / run_id, job, task)
    return run_id


def _resumed(run: Run, task: Task, store: Store, run_id: str) -> str:
    """Load the last checkpoint of an earlier run. Write nothing before the store has given us the
    run."""
    folder = store.folder / run_id
    refuse_other_data(task, folder)
    run.shelf.folder = folder / CHECKPOINTS
    run.load(run.shelf.load("last"))
    store.resume(run_id, run.version)
    store.reconfigure(run_id, run.job.model_dump(mode="json"))
    keep(folder, run.job, task)
    return run_id


# Members that come and go: any of them may become the leader


EVERY = 0.2
"""Seconds between two reports of committed leases to the coordinator."""


def begin(job: Job, task: Task, *, resume: str | None = None) -> str:
    """Create a run, or claim the earlier run `resume`, before it has members; return its id."""
    task = prepare(task)
    check_task(job, task)
    check_exporters(job.track.exporters)
    store = Store(job.track.folder)
    if resume is not None:
        refuse_other_data(task, store.folder / resume)
        store.resume(resume)  # refused if another process has the run; nothing is written before
        return resume
    return _create(job, task, store)


def take_part(
    job: Job,
    task: Task,
    comm: Comm,
    *,
    run: str,
    store: Path,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    newcomer: bool = False,
    guest: bool = False,
) -> Result:
    """Be a member until the run ends.

    A `newcomer` gets its state from the others. A `guest` can be sent away by a signal, which
    raises `Left`.
    """
    task = prepare(task)
    watchers = Observers(())
    with threads(job.threads, comm.count) as divide:
        here = _ready(job, task, comm, watchers, store / run / CHECKPOINTS, resume, newcomer)
        with ExitStack() as last, watchers:
            last.callback(lambda: here.strategy.close())  # recovery may replace the strategy
            leading = _Leading(here, task, Store(store), run, observers, watchers)
            leading.resumes = resume
            here.share_cores = divide
            here.guest = guest
            here.rebuild = partial(_rebuilt, here, task, watchers)
            here.clerk = _Reporter(here)
            here.lead = leading.changed
            comm.tell = leading.tell  # called by the receiving thread while this member waits
            if not here.newcomer:
                leading.changed()
            with _silent_if_left_out(comm, watchers):
                result = trained(here, task, run, store / run)
    if leading.leads and result.report is not None:
        try_report(Store(store), run)
    return result


def _rebuilt(run: Run, task: Task, observer: Observer) -> Strategy:
    """Set up the strategy for the present members, with the initial weights of the seed.

    Without seeding, the weights would depend on what this member has drawn so far. A checkpoint or
    another member's state, if there is one, is loaded afterwards, random state included.
    """
    seed = run.job.seed
    randomness.seed(seed)
    chosen = set_up(run.job, task, run.comm, run.schedule, observer)
    randomness.part_ways(seed, chosen.shard.index, 0)
    return chosen


def _ready(
    job: Job,
    task: Task,
    comm: Comm,
    observer: Observer,
    shelf: Path,
    resume: bool,
    newcomer: bool,
) -> Run:
    """Assemble the run together with the other members, and load its checkpoint to resume it.

    If a member is lost on the way, leave the group and come back as a newcomer.
    """
    run = None
    try:
        run = assemble(job, task, comm, observer)
        run.shelf.folder = shelf
        if resume and not newcomer:
            run.load(run.shelf.load("last"))
    except (PeerError, RuntimeError) as error:
        if not comm.elastic or newcomer or not (isinstance(error, PeerError) or is_torn(error)):
            raise
        if run is not None:
            run.strategy.let_go()
        comm.alone()
        return _ready(job, task, comm, observer, shelf, resume, newcomer=True)
    run.newcomer = run.gathering = newcomer
    return run


@contextmanager
def _silent_if_left_out(comm: Comm, watchers: Observers) -> Iterator[None]:
    """Detach the observers if this member leaves or fails outside a generation.

    The remaining members then report how the run ends.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Left) or not comm.met:
            watchers.pass_on()
        raise


class _Leading:
    """The leader's duties in an elastic group: start the observers, claim a resumed run."""

    def __init__(
        self,
        run: Run,
        task: Task,
        store: Store,
        run_id: str,
        observers: Sequence[Observer],
        watchers: Observers,
    ) -> None:
        self.leads = False
        self.resumes = False
        """Whether the run is an earlier one that no leader has claimed yet."""
        self._run, self._task, self._store, self._id = run, task, store, run_id
        self._observers, self._watchers = observers, watchers

    def _take_up(self) -> None:
        """Claim an earlier run."""
        self._run.comm.rolled_back(self._run.version, "the run went on from its checkpoint")
        self._store.resume(self._id, self._run.version, claimed=True)
        self._store.reconfigure(self._id, self._run.job.model_dump(mode="json"))
        keep(self._store.folder / self._id, self._run.job, self._task)

    def tell(self, text: str) -> None:
        """Report a message to the observers, or to stderr where this member has none."""
        if self.leads:
            self._run.notice(text)
        else:
            warn(text)

    def changed(self) -> None:
        """Start or stop leading, as this member's place in a new generation demands."""
        first = self._run.comm.index == 0
        if first and self.resumes:
            self._take_up()
        self.resumes = False
        if first and not self.leads:
            self._lead()
        elif self.leads and not first:  # it was away, and another member has become the leader
            self._watchers.pass_on()
        self.leads = first

    def _lead(self) -> None:
        """Start the observers: from now on this member records the run."""
        run, folder = self._run, self._store.folder / self._id
        for observer in self._observers:
            self._watchers.add(observer)
        self._watchers.add(Recorder(self._store, self._id))
        for name in run.job.track.exporters:
            self._watchers.add(exporter(name, folder))
        self._watchers.started(self._id, facts(run.job, self._task, run, folder))
        run.take_over()


class _Reporter:
    """Reports committed leases to the coordinator, which writes the journal."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next = 0.0

    def tick(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self.keep()

    def keep(self) -> None:
        self._run.comm.report(self._run.ledger.drain())


# Training, and what it ends with


def trained(run: Run, task: Task, run_id: str, folder: Path) -> Result:
    """Train, and report to the observers how the run ended."""
    try:
        with on_interrupt(run.interrupt), run.writer:
            run.begin()
            reason = train(run)
        model = _whole_model(run, task, folder)
        if run.comm.index == 0:
            _show(run, task, model, folder)
        result = _result(run, run_id, folder, run.interrupted or reason, model)
    except Left:
        raise
    except BaseException as error:
        _failed(run, run_id, folder, error)
        raise
    run.observer.finished(result.status, result.summary())
    return result


def _failed(run: Run, run_id: str, folder: Path, error: BaseException) -> None:
    """Save the last update and report the error, unless the supervisor reports it."""
    if isinstance(error, Exception) and not isinstance(error, CheckpointError):
        save_last_words(run)
    run.tell()
    if run.comm.watched:
        return
    if not isinstance(error, EchelonError | KeyboardInterrupt):
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    message = str(error) or type(error).__name__
    run.notice(message)
    summary = {"run": run_id, "steps": run.version, "seconds": run.seconds, "error": message}
    run.observer.finished("stopped" if isinstance(error, KeyboardInterrupt) else "failed", summary)


def _whole_model(run: Run, task: Task, folder: Path) -> nn.Module:
    """Return the trained model, from the last checkpoint if this member holds only a part of it."""
    if run.strategy.whole:
        return run.strategy.model
    return final_model(run.job, task, folder)


def _show(run: Run, task: Task, model: nn.Module, folder: Path) -> None:
    """Write the samples that the report shows. A failure is only noticed: training succeeded."""
    try:
        write_atomic(folder / EVALUATION, json.dumps(gallery(run, task, model), ensure_ascii=False))
    except Exception as error:
        run.notice(f"the report shows no samples: {type(error).__name__}: {error}")


def _result(run: Run, run_id: str, folder: Path, reason: str, model: nn.Module) -> Result:
    return Result(
        run=run_id,
        status="stopped" if run.interrupted else "done",
        reason=reason,
        steps=run.version,
        samples=run.meter.samples,
        seconds=run.seconds,
        metrics=run.evaluation.values if run.evaluation else {},
        best=_best(run),
        folder=folder,
        report=folder / "report.html" if run.job.track.report else None,
        model=model,
        nodes=run.nodes,
    )


def _best(run: Run) -> dict[str, Any] | None:
    if run.early.best is None:
        return None
    step = run.shelf.best() if run.job.checkpoint.best else None
    return {"metric": run.job.stop.metric, "value": run.early.best, "step": step}


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of `echelon.train`; `model` has the final weights.

    Under torchrun only the first process knows the run's id; in the others `run` is empty.
    """

    run: str
    status: str
    reason: str
    steps: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    best: dict[str, Any] | None
    folder: Path
    report: Path | None
    model: nn.Module
    nodes: dict[str, Any] = field(default_factory=dict)
    """Metrics of every trainer and every server, if there are servers."""

    def summary(self) -> dict[str, Any]:
        """Return plain data, as `--json` prints it."""
        return {
            "run": self.run,
            "status": self.status,
            "reason": self.reason,
            "steps": self.steps,
            "samples": self.samples,
            "seconds": round(self.seconds, 3),
            "metrics": {name: _plain(value) for name, value in self.metrics.items()},
            "best": self.best,
            "folder": str(self.folder),
            "report": str(self.report) if self.report else None,
            **({"nodes": self.nodes} if self.nodes else {}),
        }


def _plain(value: float) -> float | None:
    """Return None for NaN and infinities, which JSON cannot express."""
    return value if math.isfinite(value) else None


@contextmanager
def threads(count: int | None, members: int) -> Iterator[Callable[[int], None]]:
    """Divide this machine's cores among the members, or use `count` threads if it is given.

    Yield a function that divides them again for another number of members.
    """
    before = torch.get_num_threads()

    def divide(members: int) -> None:
        torch.set_num_threads(count or max(1, before // members))

    divide(members)
    try:
        yield divide
    finally:
        torch.set_num_threads(before)
