"""`echelon eval` and `echelon predict`: use the model of a run.

Both reopen the run: its stored job, its fitted values (vocabulary, label names, …) and its task,
on the run's own data or on new data. Nothing is fitted to new data, and all of it is held out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.common import say
from echelon.core.config import DataSection, Job
from echelon.core.errors import ConfigError, RunError, UserError, unknown
from echelon.core.files import replacing

if TYPE_CHECKING:
    from echelon.core.interfaces import Task
    from echelon.loop import KnownRun


Checkpoint = Annotated[str, typer.Option(help="`best`, `last`, or a step.")]
Folder = Annotated[str, typer.Option(help="Where the runs are.")]


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or `last`.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="For other data: data.path=…"),
    ] = None,
    checkpoint: Checkpoint = "last",
    folder: Folder = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a run's checkpoint on its held-out samples, or on data given here."""
    from echelon.core.format import to_json
    from echelon.loop.inference import evaluate_run

    known, task = reopen(folder, run, overrides or [])
    _need_target(known, task)
    result = evaluate_run(known, task, checkpoint)
    if as_json:
        say([to_json({"run": known.id, "samples": result.samples, "metrics": result.values})])
        return
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.values.items())
    say([f"{known.id} ({checkpoint}) on {result.samples:,} samples: {metrics}"])


def _need_target(known: KnownRun, task: Task) -> None:
    """Refuse data without a target column: it can be predicted, but not evaluated."""
    import torch

    from echelon.core.errors import DataError
    from echelon.data.opening.prepared import target_made_of
    from echelon.task import NAMES

    if known.job.task not in NAMES or task.valid is None or len(task.valid) == 0:
        return
    if "y" not in task.valid.gather(torch.zeros(1, dtype=torch.int64)):
        place, target = known.job.data.path or known.job.data.name, known.fitted.get("target")
        made = target_made_of(known.fitted)
        origin = f", which is made of {', '.join(map(repr, made))}" if made else ""
        raise DataError(f"{place}: evaluation needs the target column {target!r}{origin}")


def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or `last`.")],
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="A file like the one trained on.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="For a language model: the text to go on from.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens to write.")] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write here instead of to stdout.")] = None,
    checkpoint: Checkpoint = "last",
    folder: Folder = "runs",
) -> None:
    """Print one JSON object per sample, in the order of the data; or a language model's text."""
    if (data is None) == (prompt is None):
        raise UserError("give either a file of data or --prompt")
    if prompt is not None:
        from echelon.loop.inference import trained_model
        from echelon.task.builtin import Writer

        known, task = reopen(folder, run, [])
        writer = Writer(trained_model(known, task, checkpoint), known.fitted)
        text = writer.go_on(prompt, length, temperature=temperature, seed=seed)
        lines: Iterable[str] = [text]
    else:
        assert data is not None
        lines = _predicted(folder, run, checkpoint, data)
    if out is None:
        say(lines)
    else:
        _save(lines, out)


def _predicted(folder: str, run: str, checkpoint: str, data: Path) -> Iterator[str]:
    from echelon.core.format import to_json
    from echelon.loop.inference import predict_run

    if not data.exists():
        raise UserError(f"{data}: there is no such file")
    known = stored_run(folder, run)
    if known.job.task == "language_model":
        raise UserError("a language model goes on from a text: use --prompt")
    known, task = reopen_on(known, data)
    return map(to_json, predict_run(known, task, checkpoint))


def _save(lines: Iterable[str], out: Path) -> None:
    """Write a whole file or none. A device or a pipe is written to directly."""
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder, give the name of a file")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    target = out.resolve()
    plain = target.is_file() or not target.exists()
    try:
        with (
            replacing(target) if plain else nullcontext(target) as part,
            part.open("w", encoding="utf-8") as file,
        ):
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None


# Reopening a run

_MAY_CHANGE = ("data", "device", "evaluate", "threads")
"""Settings of a run that may differ when its model is used."""
_ORIGIN = ("data.name", "data.path")


def reopen(folder: str, run: str, overrides: list[str]) -> tuple[KnownRun, Task]:
    """Return a run and its task, on the run's own data unless `overrides` name other data.

    Nothing is fitted to other data, and all of it is held out.
    """
    from echelon import task

    keys = [text.partition("=")[0] for text in overrides]
    for key in keys:
        if key.partition(".")[0] not in _MAY_CHANGE:
            raise ConfigError("here, " + unknown("setting", key, _MAY_CHANGE))
    own = stored_run(folder, run)
    if any(key in _ORIGIN for key in keys):
        changed = stored_run(folder, run, [*_nowhere(own), *overrides])
        if _other_data(own, changed):
            return changed, task.load_task(changed.job, changed.fitted)
    known = stored_run(folder, run, overrides)
    if _other_data(own, known):
        return known, task.load_task(known.job, known.fitted)
    _refuse_other_split(own.job.data, known.job.data)
    return known, task.load_task(known.job)


def reopen_on(known: KnownRun, path: Path) -> tuple[KnownRun, Task]:
    """Return a run and its task on the data at `path`, which needs no target column.

    Unlike in `reopen`, `path` is no setting: its name may contain any characters.
    """
    from echelon import task

    place: dict[str, Any] = {"path": str(path), "name": None, "valid_path": None}
    if known.job.data.name is not None:
        place["options"] = {}  # options of a shipped data set mean nothing to a file
    data = known.job.data.model_copy(update=place)
    known = dataclasses.replace(known, job=known.job.model_copy(update={"data": data}))
    # Do not read the target: a label that the model does not know must not prevent a prediction.
    unasked = {"target": None} if "target" in known.fitted else {}
    return known, task.load_task(known.job, {**known.fitted, **unasked})


def stored_run(folder: str, run: str, overrides: list[str] | None = None) -> KnownRun:
    """Load a run whose task can be built again; a task from Python cannot."""
    from echelon.loop import PYTHON_TASK, load_run

    known = load_run(folder, run, overrides or [], checks=[check_stored])
    if known.job.task == PYTHON_TASK:
        raise RunError(f"run {known.id!r} was started from Python: its task is not known here")
    return known


def check_stored(job: Job) -> None:
    """Check the job of a run again: it was checked at the start, but its file may be damaged."""
    from echelon import strategy, task
    from echelon.loop import PYTHON_TASK

    strategy.check(job)
    if job.task != PYTHON_TASK:
        task.check(job)


def _nowhere(own: KnownRun) -> list[str]:
    """Return overrides that remove the run's own data, so that other data replaces it."""
    options = ["data.options={}"] if own.job.data.name is not None else []
    return ["data.name=null", "data.path=null", "data.valid_path=null", *options]


def _other_data(own: KnownRun, known: KnownRun) -> bool:
    one, other = own.job.data, known.job.data
    return (one.name, one.path) != (other.name, other.path)


def _refuse_other_split(own: DataSection, given: DataSection) -> None:
    """Refuse other `data` settings for the run's own data.

    Read or divided differently, its held-out part would contain samples that were trained on.
    """
    for key in DataSection.model_fields:
        if key != "prefetch" and getattr(own, key) != getattr(given, key):
            raise ConfigError(
                f"data.{key} cannot change on the data the run was trained on: its held-out part "
                f"would not be the same; give other data with it (data.path=…)"
            )
