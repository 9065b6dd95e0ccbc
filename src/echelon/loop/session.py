"""A whole run, from the job to its report."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from echelon.core.config import Job
from echelon.core.errors import EchelonError
from echelon.core.protocols import Observer
from echelon.core.task import Task
from echelon.loop.assemble import assemble, check_task, facts
from echelon.loop.gallery import gallery
from echelon.loop.interrupt import on_interrupt
from echelon.loop.open_run import CONFIG, FITTED
from echelon.loop.result import Result
from echelon.loop.run import Run
from echelon.loop.train import train
from echelon.task import prepare
from echelon.track import Observers, Recorder, Store, exporter, write_report

EVALUATION = "evaluation.json"


def run_job(
    job: Job, task: Task, *, resume: str | None = None, observers: Sequence[Observer] = ()
) -> Result:
    """Train `task` as `job` says, recorded in the store, from the start or where `resume` ended."""
    task = prepare(task)
    check_task(job, task)
    store = Store(job.track.folder)
    with _threads(job.threads):
        run_id = resume or store.create(
            job.name or task.name,
            job.model_dump(mode="json"),
            {"task": task.name, "strategy": job.strategy},
        )
        folder = store.folder / run_id
        everyone = Observers([*observers, Recorder(store, run_id), *_exporters(job, folder)])
        run: Run | None = None
        try:
            run = assemble(job, task, folder, everyone)
            if resume is None:
                _keep(folder, job, task)
            else:
                run.load(run.shelf.load("last"))
                store.resume(run_id, run.version)
            everyone.started(run_id, facts(job, task, run, folder))
            reason = _trained(run)
            return _finished(run, task, store, run_id, reason)
        except BaseException as error:
            _failed(everyone, folder, run, run_id, error)
            raise
        finally:
            if run is not None:
                run.strategy.close()


def _trained(run: Run) -> str:
    with on_interrupt(run.interrupt):
        run.begin()
        reason = train(run)
        run.finish()
    return run.interrupted or reason


def _finished(run: Run, task: Task, store: Store, run_id: str, reason: str) -> Result:
    folder = store.folder / run_id
    _write_json(folder / EVALUATION, gallery(run, task))
    status = "stopped" if run.interrupted else "done"
    report = folder / "report.html" if run.job.track.report else None
    result = Result(
        run=run_id,
        status=status,
        reason=reason,
        steps=run.version,
        samples=run.meter.samples,
        seconds=run.seconds,
        metrics=run.evaluation.values if run.evaluation else {},
        best=_best(run),
        folder=folder,
        report=report,
        model=run.strategy.model,
    )
    run.observer.finished(status, result.summary())
    if report is not None:
        write_report(store, run_id)
    return result


def _best(run: Run) -> dict[str, Any] | None:
    if run.early.best is None:
        return None
    return {"metric": run.job.stop.metric, "value": run.early.best, "step": run.shelf.best()}


def _failed(
    observer: Observer, folder: Path, run: Run | None, run_id: str, error: BaseException
) -> None:
    """Leave word of what happened; a user's mistake before the start leaves no run behind."""
    step = run.version if run is not None else 0
    if not isinstance(error, EchelonError | KeyboardInterrupt):
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    message = str(error) or type(error).__name__
    observer.noticed(step, message)
    observer.finished("failed", {"run": run_id, "steps": step, "error": message})


def _keep(folder: Path, job: Job, task: Task) -> None:
    """The resolved config and whatever was learnt from the data, beside the run."""
    text = yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(text, encoding="utf-8")
    _write_json(folder / FITTED, dict(task.fitted))


def _exporters(job: Job, folder: Path) -> list[Observer]:
    return [exporter(name, folder) for name in job.track.exporters]


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
