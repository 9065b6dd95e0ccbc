"""Use a trained run: evaluate a checkpoint, predict, load the trained model, show samples.

One process does this, however many trained the run. `gallery` collects what the report shows of the
trained model: a confusion matrix, or samples of its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.checkpoint import Shelf
from echelon.checkpoint.store import CHECKPOINTS
from echelon.comm import Alone
from echelon.core.config import Job
from echelon.core.errors import DataError
from echelon.core.format import warn
from echelon.core.interfaces import Strategy, Task
from echelon.core.types import Batch, Lease, Shard
from echelon.data.loader import Loader, ranges
from echelon.loop.build import find_device, held_out, numerics
from echelon.loop.known_run import KnownRun
from echelon.loop.run import Evaluation, Run, evaluate, evaluation_size
from echelon.optim import build_schedule
from echelon.strategy import build
from echelon.strategy.model import build_model, load_weights, release
from echelon.task import prepare

_BATCH = 256
"""Samples in a batch of predictions."""


def evaluate_run(known: KnownRun, task: Task, which: str) -> Evaluation:
    """Return loss and metrics of a checkpoint over the task's held-out samples."""
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


def _strategy(known: KnownRun, task: Task, which: str, device: torch.device) -> Strategy:
    """Return a single-process strategy with the weights of checkpoint `which`."""
    job = known.job
    schedule = build_schedule(job.schedule, 1)
    strategy = build("single", numerics(job, device), schedule)
    strategy.setup(task, Alone())
    load_weights(strategy.model, _weights(known.folder, which))
    return strategy


def predict_run(known: KnownRun, task: Task, which: str) -> Iterator[Any]:
    """Yield the model's output for each held-out sample as plain data, in the samples' order."""
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


def _plain(task: Task, output: Any) -> list[Any]:
    if task.decode is not None:
        return task.decode(output)
    tensor = output if isinstance(output, torch.Tensor) else output.logits
    rows: list[Any] = tensor.float().cpu().tolist()
    return rows


def trained_model(known: KnownRun, task: Task, which: str) -> nn.Module:
    """Return the model with the weights of checkpoint `which`, ready for use."""
    return _ready(known.job, task, _weights(known.folder, which))


def final_model(job: Job, task: Task, folder: Path) -> nn.Module:
    """Return the model that a run in other processes ended with."""
    return _ready(job, task, _weights(folder, "last"))


def _ready(job: Job, task: Task, weights: dict[str, Tensor]) -> nn.Module:
    """Build the model for inference: no activations are recomputed to save memory."""
    model = build_model(task, numerics(job, find_device(job.device)))
    load_weights(model, weights)
    release(model)
    return model.eval()


def _weights(folder: Path, which: str) -> dict[str, Tensor]:
    cut = Shelf(folder / CHECKPOINTS, notice=warn).load(which)
    found: dict[str, Tensor] = cut["strategy"]["model"]
    return found


_SHOWN = 12


def gallery(run: Run, task: Task, model: nn.Module) -> dict[str, Any]:
    """Return the content of `evaluation.json` as plain data."""
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
    valid.shard = Shard()  # this member's own share of so few samples may be empty
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
