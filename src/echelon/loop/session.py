"""A whole run, from the job to its report."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
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
from echelon.track import Observers, Recorder, Store, exporter, try_report
from echelon.track.exporters import check_exporters

EVALUATION = "evaluation.json"


def run_job(
    job: Job, task: Task, *, resume: str | None = None, observers: Sequence[Observer] = ()
) -> Result:
    """Train `task` as `job` says, recorded in the store, from the start or where `resume` ended."""
    task = prepare(task)
    check_task(job, task)
    check_exporters(job.track.exporters)
    store = Store(job.track.folder)
    with _threads(job.threads):
        run_id = resume or store.create(
            job.name or task.name,
            job.model_dump(mode="json"),
            {"task": task.name, "strategy": job.strategy},
        )
        folder = store.folder / run_id
        exporters = [exporter(name, folder) for name in job.track.exporters]
        with Observers([*observers, Recorder(store, run_id), *exporters]) as everyone:
            run = assemble(job, task, folder, everyone)
            with closing(run.strategy):
                if resume is None:
                    _keep(folder, job, task)
                else:
                    _go_on(run, store, run_id)
                everyone.started(run_id, facts(job, task, run, folder))
                result = _trained(run, task, run_id, folder)
        if result.report is not None:
            try_report(store, run_id)
        return result


def _go_on(run: Run, store: Store, run_id: str) -> None:
    run.load(run.shelf.load("last"))
    store.resume(run_id, run.version)


def _trained(run: Run, task: Task, run_id: str, folder: Path) -> Result:
    try:
        with on_interrupt(run.interrupt):
            run.begin()
            reason = train(run)
            run.finish()
        _write_json(folder / EVALUATION, gallery(run, task))
        result = _result(run, run_id, folder, run.interrupted or reason)
    except BaseException as error:
        _failed(run, run_id, folder, error)
        raise
    run.observer.finished(result.status, result.summary())
    return result


def _result(run: Run, run_id: str, folder: Path, reason: str) -> Result:
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
        model=run.strategy.model,
    )


def _best(run: Run) -> dict[str, Any] | None:
    if run.early.best is None:
        return None
    step = run.shelf.best() if run.job.checkpoint.best else None
    return {"metric": run.job.stop.metric, "value": run.early.best, "step": step}


def _failed(run: Run, run_id: str, folder: Path, error: BaseException) -> None:
    """Leave word of what happened beside the run."""
    if not isinstance(error, EchelonError | KeyboardInterrupt):
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    message = str(error) or type(error).__name__
    run.notice(message)
    summary = {"run": run_id, "steps": run.version, "seconds": run.seconds, "error": message}
    run.observer.finished("failed", summary)


def _keep(folder: Path, job: Job, task: Task) -> None:
    """The resolved config and whatever was learnt from the data, beside the run."""
    text = yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    (folder / CONFIG).write_text(text, encoding="utf-8")
    _write_json(folder / FITTED, dict(task.fitted))


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
