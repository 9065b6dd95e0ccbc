"""A run whose members come and go: any of them may come to lead it.

Whoever is first in the present generation records the run, tells those who watch and writes the
checkpoints. All others make the same steps and are silent, until one of them becomes the first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from echelon.comm.peers import is_torn
from echelon.core.config import Job
from echelon.core.errors import Left, PeerError
from echelon.core.format import warn
from echelon.core.interfaces import Comm, Observer, Task
from echelon.loop.assemble import CHECKPOINTS, assemble, check_task, facts, set_up
from echelon.loop.result import Result
from echelon.loop.run import Run
from echelon.loop.session import keep, refuse_other_data, threads, trained
from echelon.task import prepare
from echelon.track import Observers, Recorder, Store, exporter, try_report
from echelon.track.exporters import check_exporters

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
