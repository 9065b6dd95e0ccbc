"""What the report shows of the trained model: a confusion matrix, or samples of its output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.interfaces import Task
from echelon.core.types import Batch, Lease, Shard
from echelon.data.loader import Loader
from echelon.loop.run import Run

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
