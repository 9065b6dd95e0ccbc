"""A task from the user's own file: `path/to/file.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from echelon.core.config import Job
from echelon.core.errors import TaskError, unknown
from echelon.core.task import Task


def load_from_file(job: Job, *, other_data: bool = False) -> Task:
    """Call the function with the job's `args` (and the job itself, if it asks for `job`).

    Only a function that asks for it can take `other_data` than the run was trained on.
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
    """Import the file as a script would be: its folder first on the path, and it stays there.

    What the file imports may be imported late, in a function or by a model that is built later.
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
