"""A whole run, from the job to its report."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from echelon.comm import Alone
from echelon.core.config import Job
from echelon.core.errors import CheckpointError, EchelonError, Left, RunError
from echelon.core.interfaces import Comm, Observer, Task
from echelon.loop.assemble import CHECKPOINTS, assemble, check_task, facts
from echelon.loop.clerk import journalled
from echelon.loop.gallery import gallery
from echelon.loop.inference import final_model
from echelon.loop.interrupt import on_interrupt
from echelon.loop.open_run import CONFIG, FITTED, read_fitted
from echelon.loop.result import Result
from echelon.loop.run import Run
from echelon.loop.safety import save_last_words
from echelon.loop.train import train
from echelon.task import prepare
from echelon.track import Observers, Recorder, Store, exporter, try_report
from echelon.track.exporters import check_exporters

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
        _write(folder / EVALUATION, json.dumps(gallery(run, task, model), ensure_ascii=False))
    except Exception as error:
        run.notice(f"the report shows no samples: {type(error).__name__}: {error}")


def keep(folder: Path, job: Job, task: Task) -> None:
    """The resolved config and whatever was learnt from the data, beside the run."""
    text = yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    _write(folder / CONFIG, text)
    _write(folder / FITTED, json.dumps(dict(task.fitted), ensure_ascii=False))


def _write(path: Path, text: str) -> None:
    """All of it or nothing."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


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
