"""Is a task made of what a task is made of?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from echelon.core.errors import TaskError
from echelon.core.task import Task

_CALLED = {
    "model": "a module or a function that makes one",
    "loss": "a function of (output, batch)",
    "forward": "a function of (model, batch)",
}
_PERHAPS_CALLED = {
    "optimizer": "a function of the parameters that makes an optimizer",
    "augment": "a function of (batch, draws)",
    "decode": "a function of a batch of outputs",
    "samples": "a function of the model",
}


def check_kinds(task: Task) -> None:
    """Refuse in one line what would fail in the middle of a run."""
    for name, wanted in _CALLED.items():
        if not callable(getattr(task, name)):
            raise _wrong(task, name, wanted)
    for name, wanted in _PERHAPS_CALLED.items():
        value = getattr(task, name)
        if value is not None and not callable(value):
            raise _wrong(task, name, f"None or {wanted}")
    if not isinstance(task.name, str):
        raise _wrong(task, "name", "a text")
    if not _are_texts(task.labels):
        raise _wrong(task, "labels", "a tuple of texts")
    _check_metrics(task)
    for name in ("about", "fitted"):
        _check_plain(task, name)


def _check_metrics(task: Task) -> None:
    if not isinstance(task.metrics, Mapping):
        raise _wrong(task, "metrics", "a mapping of names to metrics")
    if "loss" in task.metrics:
        raise TaskError("a metric may not be called 'loss': that is the loss itself")
    for name, metric in task.metrics.items():
        if isinstance(metric, type):
            raise TaskError(f"metric {name!r} is the class {metric.__name__}: give one of it, made")
        if not callable(metric) and not _measures(metric):
            raise TaskError(
                f"metric {name!r} is a {type(metric).__name__}: it must be a Metric or a function "
                f"of (output, batch)"
            )


def _check_plain(task: Task, name: str) -> None:
    value = getattr(task, name)
    if not isinstance(value, Mapping):
        raise _wrong(task, name, "a mapping")
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"task.{name} is not plain data: {error}") from None


def _wrong(task: Task, name: str, wanted: str) -> TaskError:
    return TaskError(f"task.{name} is a {type(getattr(task, name)).__name__}: it must be {wanted}")


def _are_texts(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(item, str) for item in value)


def _measures(metric: Any) -> bool:
    return callable(getattr(metric, "measure", None)) and callable(getattr(metric, "value", None))
