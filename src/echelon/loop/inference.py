"""Use a trained run; samples for the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon import strategy
from echelon.checkpoint import Shelf
from echelon.checkpoint.store import CHECKPOINTS
from echelon.comm import Alone
from echelon.core.config import Job, load_job
from echelon.core.errors import DataError, RunError
from echelon.core.format import warn
from echelon.core.interfaces import Strategy, Task
from echelon.core.types import Batch, Lease, Shard
from echelon.data.loader import Loader, ranges
from echelon.loop.build import find_device, held_out, numerics
from echelon.loop.run import Evaluation, Run, evaluate, evaluation_size
from echelon.optim import build_schedule
from echelon.strategy import build
from echelon.strategy.model import build_model, load_weights, release
from echelon.task import prepare
from echelon.track import Store

# --- inference ---
# A trained run put to use: its weights, on the data it was trained for or on new data.

_BATCH = 256


def evaluate_run(known: KnownRun, task: Task, which: str) -> Evaluation:
    """Loss and metrics of a checkpoint over the task's held-out samples."""
    task, job = prepare(task), known.job
    device = find_device(job.device)
    loader = held_out(job, task, device)
    if loader is None:
        raise DataError(f"task {task.name!r} has no held-out samples")
    strategy = _strategy(known, task, which, device)
    try:
        return evaluate(strategy, loader, dict(task.metrics), evaluation_size(job))  # type: ignore[arg-type]  # prepared
    finally:
        strategy.close()


def predict_run(known: KnownRun, task: Task, which: str) -> Iterator[Any]:
    """What the model says of each held-out sample, as plain data, in the samples' order."""
    task, job = prepare(task), known.job
    device = find_device(job.device)
    loader = held_out(job, task, device)
    if loader is None:
        raise DataError("there is nothing to predict: the data has no samples")
    model = trained_model(known, task, which)
    with (
        torch.inference_mode(),
        closing(loader.stream(ranges(len(loader.source), _BATCH))) as stream,
    ):
        for _lease, micro in stream:
            for batch in micro:
                yield from _plain(task, task.forward(model, batch))


def trained_model(known: KnownRun, task: Task, which: str) -> nn.Module:
    """The model with a checkpoint's weights, ready to be used."""
    return _ready(known.job, task, _weights(known.folder, which))


def final_model(job: Job, task: Task, folder: Path) -> nn.Module:
    """The model that a run in other processes ended with."""
    return _ready(job, task, _weights(folder, "last"))


def _ready(job: Job, task: Task, weights: dict[str, Tensor]) -> nn.Module:
    """To be used, not trained: nothing is computed twice to save memory."""
    model = build_model(task, numerics(job, find_device(job.device)))
    load_weights(model, weights)
    release(model)
    return model.eval()


def _strategy(known: KnownRun, task: Task, which: str, device: torch.device) -> Strategy:
    """One process is enough to look, however many trained."""
    job = known.job
    schedule = build_schedule(job.schedule, 1)
    strategy = build("single", numerics(job, device), schedule)
    strategy.setup(task, Alone())
    load_weights(strategy.model, _weights(known.folder, which))
    return strategy


def _weights(folder: Path, which: str) -> dict[str, Tensor]:
    cut = Shelf(folder / CHECKPOINTS, notice=warn).load(which)
    found: dict[str, Tensor] = cut["strategy"]["model"]
    return found


def _plain(task: Task, output: Any) -> list[Any]:
    if task.decode is not None:
        return task.decode(output)
    tensor = output if isinstance(output, torch.Tensor) else output.logits
    rows: list[Any] = tensor.float().cpu().tolist()
    return rows


# --- open_run ---
# An earlier run, found again: its job and what it had learnt from its data.

CONFIG, FITTED = "config.yaml", "fitted.json"
PYTHON_TASK = "python"
"""The task of a run that was started with a `Task` from Python."""

_FIXED = ("task", "args", "seed", "model", "optimizer")


@dataclass(frozen=True, slots=True)
class KnownRun:
    """A run that was started before."""

    id: str
    folder: Path
    job: Job
    fitted: dict[str, Any]


def rearranged(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run forgets of its arrangement because these settings are given anew."""
    forgotten: dict[str, Any] = {}
    if "mesh" not in given and {"strategy", "workers"} & set(given):
        forgotten["mesh"] = {}
    if "strategy" in given:
        forgotten |= {name: {} for name in strategy.sections() if name != given["strategy"]}
    if "workers" not in given and "mesh" in given:
        forgotten["workers"] = 1
    return forgotten


def load_run(
    folder: str | Path,
    run: str,
    overrides: Sequence[str] = (),
    *,
    checks: Sequence[Callable[[Job], None]] = (),
) -> KnownRun:
    """Find a run by id, the beginning of one, or `last`."""
    found = Store(folder).run(run)
    config = found.folder / CONFIG
    if not config.is_file():
        raise RunError(f"run {found.id!r} never began to train: there is no {config}")
    forgotten = rearranged({key: value for key, _, value in (t.partition("=") for t in overrides)})
    reset = [f"{key}={value}" for key, value in forgotten.items()]
    job = load_job(config, [*reset, *overrides], checks=checks).job
    return KnownRun(found.id, found.folder, job, read_fitted(found.folder))


def read_fitted(folder: Path) -> dict[str, Any]:
    """What a run had learnt from its data beside the weights."""
    path = folder / FITTED
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged: it must hold one JSON object")
    return found


def check_resume(known: KnownRun, job: Job) -> None:
    """Refuse to go on with another order, task or model than the run began with."""
    began = load_job(known.folder / CONFIG).job.model_dump(mode="json")
    given = job.model_dump(mode="json")
    for key in _FIXED:
        if found := _difference(key, began[key], given[key]):
            name, was, now = found
            raise RunError(
                f"run {known.id!r} began with {name} = {was!r}: it cannot go on with {now!r}"
            )


def _difference(name: str, was: Any, now: Any) -> tuple[str, Any, Any] | None:
    """The first setting that is not as it was: its dotted name and both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        pairs = [(f"{name}.{key}", was.get(key), now.get(key)) for key in was | now]
        return next(filter(None, (_difference(*pair) for pair in pairs)), None)
    return None if was == now else (name, was, now)


# --- gallery ---
# What the report shows of the trained model: a confusion matrix, or samples of its output.

_SHOWN = 12


def gallery(run: Run, task: Task, model: nn.Module) -> dict[str, Any]:
    """Plain data for `evaluation.json`."""
    found: dict[str, Any] = {"labels": list(task.labels)}
    matrix = _confusion(run)
    if matrix is not None:
        found["confusion"] = matrix
    with torch.inference_mode():
        model.eval()
        if task.samples is not None:
            found["samples"] = task.samples(model)
        elif task.decode is not None and run.valid is not None and matrix is None:
            found["samples"] = _decoded(run.valid, task, model)
    return found


def _confusion(run: Run) -> list[list[int]] | None:
    totals = run.evaluation.totals if run.evaluation is not None else {}
    for name, total in totals.items():
        if getattr(run.metrics[name], "is_confusion", False):
            rows: list[list[int]] = total.long().tolist()
            return rows
    return None


def _decoded(valid: Loader, task: Task, model: nn.Module) -> list[dict[str, str]]:
    assert task.decode is not None
    valid.shard = Shard()  # a member's own part of so few may be none
    (batch,) = valid.read(Lease(0, 0, min(_SHOWN, len(valid.source))))
    outputs = task.decode(task.forward(model, batch))
    return [
        {
            "input": f"held-out sample {i}",
            "output": _words(output),
            "target": _target(batch, i, task),
        }
        for i, output in enumerate(outputs)
    ]


def _target(batch: Batch, index: int, task: Task) -> str:
    column = batch.get("y")
    if not isinstance(column, Tensor):
        return ""
    value = column[index]
    if task.labels and not value.is_floating_point():
        return task.labels[int(value)]
    return f"{value.item():g}" if value.numel() == 1 else str(value.tolist())


def _words(output: Any) -> str:
    if isinstance(output, dict):
        return ", ".join(f"{key} {_words(value)}" for key, value in output.items())
    return f"{output:.4g}" if isinstance(output, float) else str(output)
