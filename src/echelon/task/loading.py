"""From a job to a task that is ready to train, and the checks on the way.

    check         a job's task, model and data go together; needs no torch, so errors come at once
    load_task     a built-in task (builtin.py), or the user's: `path/to/file.py:function`
    prepare       … with its parts checked and its data opened as `BatchSource`s

A `Task` that is passed to `echelon.train` is checked by `check_python`, then prepared like others.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from echelon.core.config import DataSection, Job
from echelon.core.errors import ConfigError, TaskError, unknown
from echelon.core.interfaces import Task
from echelon.models.registry import model_choice

NAMES = ("classify", "click_rate", "language_model", "regress", "text_classify")
"""The keys of `builtin.BUILT_IN`, known without importing torch."""


# A job is checked before anything heavy is imported


def check(job: Job) -> None:
    """Refuse a job whose task, model and data do not go together. Needs no torch."""
    if ":" in job.task:
        if job.model:
            raise ConfigError("model is chosen by the task's own file: remove it", ("model",))
        return
    if job.task not in NAMES:
        hint = (
            ""
            if "/" not in job.task and not job.task.endswith(".py")
            else ("; a task of your own is path/to/file.py:function")
        )
        raise ConfigError(unknown("task", job.task, NAMES) + hint, ("task",))
    from echelon import models

    models.options(*model_choice(job))
    refuse_misfit(job)
    refuse_idle(job)
    if job.data.name is None and job.data.path is None:
        raise ConfigError(
            f"task {job.task!r} needs data: set data.name (a shipped set) or data.path", ("data",)
        )


_TEXT = ("tokens", "vocabulary", "text", "length")
_IDLE = {  # settings of `data` that have no effect on a task
    "classify": _TEXT,
    "regress": (*_TEXT, "augment"),
    "click_rate": (*_TEXT, "augment"),
    "text_classify": ("augment", "columns", "normalise"),
    "language_model": ("augment", "columns", "normalise", "target", "text"),
}


def refuse_idle(job: Job) -> None:
    """Refuse `data` settings without effect on a built-in task, unless they have their default."""
    for key in _IDLE[job.task]:
        if getattr(job.data, key) != getattr(DataSection(), key):
            raise ConfigError(f"data.{key} has no effect on task {job.task!r}", ("data", key))


_DENSE = ("alexnet", "cnn", "mlp", "resnet", "softmax")
_FITTING = {  # the models that fit a task
    "classify": _DENSE,
    "regress": _DENSE,
    "click_rate": ("dlrm",),
    "text_classify": ("textcnn",),
    "language_model": ("gpt",),
}


def refuse_misfit(job: Job) -> None:
    """Refuse a model that does not take the data of a built-in task, or gives other scores."""
    name, _ = model_choice(job)
    if name not in _FITTING[job.task]:
        raise ConfigError(
            f"model {name!r} does not fit task {job.task!r} "
            f"(models that fit: {', '.join(_FITTING[job.task])})",
            ("model", "name"),
        )


def check_python(job: Job) -> None:
    """Refuse settings of model and data for a `Task` from Python, which brings both itself."""
    if job.model:
        raise ConfigError("the task brings its own model: remove `model`", ("model",))
    for key in DataSection.model_fields:
        if key != "prefetch" and getattr(job.data, key) != getattr(DataSection(), key):
            raise ConfigError(
                f"the task brings its own data: data.{key} has no effect on it", ("data", key)
            )


# The task is loaded


def anchored(job: Job, folder: Path) -> Job:
    """Return the job with the path of its task file made absolute.

    The file is searched for in `folder` first, which is where the job file is.
    """
    if ":" not in job.task:
        return job
    path, _, function = job.task.rpartition(":")
    beside = folder / path
    file = beside if beside.is_file() else Path(path)
    return job.model_copy(update={"task": f"{file.resolve()}:{function}"})


def load_task(job: Job, fitted: dict[str, Any] | None = None) -> Task:
    """Build the job's task; with `fitted`, the values that a run has fitted, on other data."""
    if ":" in job.task:
        return load_from_file(job, other_data=fitted is not None)
    from echelon.task.builtin import BUILT_IN

    return BUILT_IN[job.task](job, fitted)


def load_from_file(job: Job, *, other_data: bool = False) -> Task:
    """Call the task function with the job's `args`, and with the job if it has a parameter `job`.

    Only a function with that parameter can be used on `other_data` than the run was trained on.
    """
    path, _, name = job.task.rpartition(":")
    function = _function(Path(path), name)
    if other_data and "job" not in inspect.signature(function).parameters:
        raise TaskError(
            f"{job.task} brings its own data: other data can be given to a function that takes "
            f"the parameter `job` and reads job.data.path"
        )
    task = function(**_arguments(function, job))
    if not isinstance(task, Task):
        raise TaskError(
            f"{job.task} returned a {type(task).__name__}: it must return an echelon.Task"
        )
    return task


def _function(path: Path, name: str) -> Callable[..., Any]:
    if not path.is_file():
        raise TaskError(f"task {path}:{name}: there is no file {path}")
    module = _import(path)
    public = [key for key, value in vars(module).items() if callable(value) and key[:1] != "_"]
    function = getattr(module, name, None)
    if not callable(function):
        raise TaskError(f"{path}: " + unknown("function", name, public))
    found: Callable[..., Any] = function
    return found


def _import(path: Path) -> ModuleType:
    """Import a file like a script, with its folder first on `sys.path`.

    The folder stays on the path: the file may import its neighbors later, inside functions.
    """
    spec = importlib.util.spec_from_file_location(f"echelon_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TaskError(f"task file {path} must be a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise TaskError(f"{error.filename}:{error.lineno}: {error.msg}") from None
    return module


def _arguments(function: Callable[..., Any], job: Job) -> dict[str, Any]:
    """Return the keyword arguments of a task function; refuse `args` that do not fit it."""
    given: dict[str, Any] = dict(job.args)
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TaskError(f"{job.task}: args go by name, but {name!r} is positional-only")
    if "job" in given:
        raise TaskError("args: 'job' is the job itself: call the argument something else")
    if "job" in parameters:
        given["job"] = job
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in given:
        if key not in parameters and not takes_any:
            raise TaskError("args: " + unknown(f"argument of {job.task}", key, parameters))
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind in named and name not in given
    ]
    if missing:
        raise TaskError(f"{job.task} needs args: {', '.join(missing)}")
    return given


# Its parts are checked and opened


def prepare(task: Task) -> Task:
    """Check a task; return it with its data as `BatchSource`s and its metrics as `Metric`s."""
    from echelon.data.sources import as_source
    from echelon.task.metrics import as_metrics

    check_kinds(task)
    return dataclasses.replace(
        task,
        train=None if task.train is None else as_source(task.train),
        valid=None if task.valid is None else as_source(task.valid),
        metrics=as_metrics(task.metrics),
    )


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
    """Refuse a task with parts of the wrong type, which would fail in the middle of a run."""
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
