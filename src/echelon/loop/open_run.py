"""An earlier run, found again: its job and what it had learnt from its data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon import strategy
from echelon.core.config import Job, load_job
from echelon.core.errors import RunError
from echelon.track import Store

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
