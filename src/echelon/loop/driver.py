"""`run_member`: ONE driver."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from torch import nn

from echelon.checkpoint.store import CHECKPOINTS
from echelon.comm import Alone
from echelon.comm.peers import is_torn
from echelon.core.config import Job
from echelon.core.errors import CheckpointError, EchelonError, Left, PeerError, RunError
from echelon.core.files import write_atomic
from echelon.core.format import warn
from echelon.core.interfaces import Comm, Observer, Task
from echelon.loop.build import assemble, check_task, facts, set_up
from echelon.loop.inference import CONFIG, FITTED, final_model, gallery, read_fitted
from echelon.loop.journal import journalled
from echelon.loop.recovery import save_last_words
from echelon.loop.run import Run
from echelon.loop.train import train
from echelon.task import prepare
from echelon.track import Observers, Recorder, Store, exporter, try_report
from echelon.track.exporters import check_exporters

# --- session ---
# A whole run, from the job to its report.

EVALUATION = "evaluation.json"


def run_job(
    job: Job,
    task: Task,
    *,
    comm: Comm | None = None,
    resume: str | None = None,
    observers: Sequence[Observer] = (),
    beside: int | None = None,
) -> Result:
    """Train `task` as `job` says, recorded in the store, from the start or where `resume` ended.

    Of several members it is the first that does this; the others call `assist`. `beside` of them
    share this machine's cores, all if not given.
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
                run_id = _begun(run, task, store)
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
    """Be one of the other members: the same steps, and nothing recorded."""
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


def _begun(run: Run, task: Task, store: Store) -> str:
    """A new run: its row, its folder, its config."""
    job = run.job
    run_id = store.create(
        job.name or task.name,
        job.model_dump(mode="json"),
        {"task": task.name, "strategy": job.strategy},
    )
    keep(store.folder / run_id, job, task)
    run.shelf.folder = store.folder / run_id / CHECKPOINTS
    return run_id


def _resumed(run: Run, task: Task, store: Store, run_id: str) -> str:
    """An earlier run, from its last whole cut on. Nothing is written before it is ours."""
    folder = store.folder / run_id
    refuse_other_data(task, folder)
    run.shelf.folder = folder / CHECKPOINTS
    run.load(run.shelf.load("last"))
    store.resume(run_id, run.version)
    store.reconfigure(run_id, run.job.model_dump(mode="json"))
    keep(folder, run.job, task)
    return run_id


def refuse_other_data(task: Task, folder: Path) -> None:
    """What a run had learnt from its data has to be what the data says now."""
    if json.loads(json.dumps(dict(task.fitted))) != read_fitted(folder):
        raise RunError(f"run {folder.name!r} began with other data: labels or statistics differ")


def trained(run: Run, task: Task, run_id: str, folder: Path) -> Result:
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


def _whole_model(run: Run, task: Task, folder: Path) -> nn.Module:
    """The trained model; where members hold parts of it, as it was just saved."""
    if run.strategy.whole:
        return run.strategy.model
    return final_model(run.job, task, folder)


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


def _failed(run: Run, run_id: str, folder: Path, error: BaseException) -> None:
    """Leave word of what happened beside the run, unless who watches over all will."""
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


def _show(run: Run, task: Task, model: nn.Module, folder: Path) -> None:
    """What the report will show; a fault in showing does not undo the training."""
    try:
        write_atomic(folder / EVALUATION, json.dumps(gallery(run, task, model), ensure_ascii=False))
    except Exception as error:
        run.notice(f"the report shows no samples: {type(error).__name__}: {error}")


def keep(folder: Path, job: Job, task: Task) -> None:
    """The resolved config and whatever was learnt from the data, beside the run."""
    text = yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    write_atomic(folder / CONFIG, text)
    write_atomic(folder / FITTED, json.dumps(dict(task.fitted), ensure_ascii=False))


@contextmanager
def threads(count: int | None, members: int) -> Iterator[Callable[[int], None]]:
    """Members share the cores, unless the job says how many threads each gets.

    What comes out divides them anew, for another number of members.
    """
    before = torch.get_num_threads()

    def divide(members: int) -> None:
        torch.set_num_threads(count or max(1, before // members))

    divide(members)
    try:
        yield divide
    finally:
        torch.set_num_threads(before)


# --- taking_part ---
# A run whose members come and go: any of them may come to lead it.
#
# Whoever is first in the present generation records the run, tells those who watch and writes the
# checkpoints. All others make the same steps and are silent, until one of them becomes the first.

EVERY = 0.2
"""Seconds between two reports of what is committed."""


def begin(job: Job, task: Task, *, resume: str | None = None) -> str:
    """Before any member is there: the run, found again or made. Returns its id."""
    task = prepare(task)
    check_task(job, task)
    check_exporters(job.track.exporters)
    store = Store(job.track.folder)
    if resume is not None:
        refuse_other_data(task, store.folder / resume)
        store.resume(resume)  # it is ours before anything is written, or somebody else's
        return resume
    run_id = store.create(
        job.name or task.name,
        job.model_dump(mode="json"),
        {"task": task.name, "strategy": job.strategy},
    )
    keep(store.folder / run_id, job, task)
    return run_id


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
    """Be a member until the run ends, a guest until it is asked to go, which raises `Left`; a
    newcomer gets its state from the others."""
    task = prepare(task)
    watchers = Observers(())
    with threads(job.threads, comm.count) as divide:
        here = _ready(job, task, comm, watchers, store / run / CHECKPOINTS, resume, newcomer)
        with ExitStack() as last, watchers:
            last.callback(lambda: here.strategy.close())  # be it another one by then
            leading = _Leading(here, task, Store(store), run, observers, watchers)
            leading.resumes = resume
            here.share_cores = divide
            here.guest = guest
            here.rebuild = lambda: set_up(job, task, comm, here.schedule, watchers)
            here.clerk = _Reporter(here)
            here.lead = leading.changed
            comm.tell = leading.tell  # while this member waits, the thread that hears it tells
            if not here.newcomer:
                leading.changed()
            with _silent_if_left_out(comm, watchers):
                result = trained(here, task, run, store / run)
    if leading.leads and result.report is not None:
        try_report(Store(store), run)
    return result


def _ready(
    job: Job,
    task: Task,
    comm: Comm,
    observer: Observer,
    shelf: Path,
    resume: bool,
    newcomer: bool,
) -> Run:
    """A run made ready with the others; if one is lost on the way, as a newcomer's is."""
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
    """Of a run that goes on, or ended while this member was not in it, others tell how."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Left) or not comm.met:
            watchers.pass_on()
        raise


class _Leading:
    """What the first member does beside training."""

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
        """Whether the run is an earlier one, and nobody has taken it up yet."""
        self._run, self._task, self._store, self._id = run, task, store, run_id
        self._observers, self._watchers = observers, watchers

    def _take_up(self) -> None:
        """An earlier run is ours now."""
        self._run.comm.rolled_back(self._run.version, "the run went on from its checkpoint")
        self._store.resume(self._id, self._run.version, claimed=True)
        self._store.reconfigure(self._id, self._run.job.model_dump(mode="json"))
        keep(self._store.folder / self._id, self._run.job, self._task)

    def tell(self, text: str) -> None:
        """What a person should know: through those who watch, or directly where nobody does yet."""
        if self.leads:
            self._run.notice(text)
        else:
            warn(text)

    def changed(self) -> None:
        """There is a new generation."""
        first = self._run.comm.index == 0
        if first and self.resumes:
            self._take_up()
        self.resumes = False
        if first and not self.leads:
            self._lead()
        elif self.leads and not first:  # it was away, and is back as one of the others
            self._watchers.pass_on()
        self.leads = first

    def _lead(self) -> None:
        """From now on this member tells and records."""
        run, folder = self._run, self._store.folder / self._id
        for observer in self._observers:
            self._watchers.add(observer)
        self._watchers.add(Recorder(self._store, self._id))
        for name in run.job.track.exporters:
            self._watchers.add(exporter(name, folder))
        self._watchers.started(self._id, facts(run.job, self._task, run, folder))
        run.take_over()


class _Reporter:
    """Tells the coordinator what is committed; it keeps the journal."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._next = 0.0

    def tick(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + EVERY
            self.keep()

    def keep(self) -> None:
        self._run.comm.report(self._run.ledger.drain())


# --- result ---
# What a run ended with.


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of `echelon.train`; `model` has the final weights.

    Of processes that torchrun started the first knows the run; in the others `run` is empty.
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
    """Figures by trainer and by server, where there are servers."""

    def summary(self) -> dict[str, Any]:
        """Plain data, as `--json` prints it."""
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
    """JSON has no word for what is not a number."""
    return value if math.isfinite(value) else None


# --- interrupt ---
# Ctrl-C, SIGTERM or a closed terminal end a run between two steps, with a checkpoint.
#
# A second one ends it now.

SAME_SECONDS = 0.1
"""`timeout` and torchrun signal a process and its group, so that it comes twice: one wish."""


def wishes() -> tuple[signal.Signals, ...]:
    """The signals that ask for an end. Under `nohup` a closed terminal does not."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    asking = (signal.SIGINT, signal.SIGTERM)
    return asking if ignored else (*asking, signal.SIGHUP)


@contextmanager
def on_interrupt(ask: Callable[[str], None]) -> Iterator[None]:
    """While inside, the first of these signals calls `ask` with its name."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; its owner decides what a signal does
        return
    came: list[float] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        came.append(time.monotonic())
        if len(came) == 1:
            ask(signal.Signals(number).name)
        elif came[-1] - came[-2] >= SAME_SECONDS:
            raise KeyboardInterrupt

    before: dict[int, Any] = {number: signal.signal(number, handle) for number in wishes()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
