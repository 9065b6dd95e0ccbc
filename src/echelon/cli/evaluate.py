"""`echelon eval`: how good a trained run is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.arguments import say

if TYPE_CHECKING:
    from echelon.core.task import Task
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
    from echelon.cli.reopening import reopen
    from echelon.loop.inference import evaluate_run
    from echelon.track.text import to_json

    known, task = reopen(folder, run, overrides or [])
    _need_target(known, task)
    found = evaluate_run(known, task, checkpoint)
    if as_json:
        say([to_json({"run": known.id, "samples": found.samples, "metrics": found.values})])
        return
    figures = ", ".join(f"{name} {value:.4f}" for name, value in found.values.items())
    say([f"{known.id} ({checkpoint}) on {found.samples:,} samples: {figures}"])


def _need_target(known: KnownRun, task: Task) -> None:
    """New data of a built-in task may come without the answers; then it can only be predicted."""
    import torch

    from echelon.core.errors import DataError
    from echelon.data.opening.prepared import target_made_of
    from echelon.task import NAMES

    if known.job.task not in NAMES or task.valid is None or len(task.valid) == 0:
        return
    if "y" not in task.valid.gather(torch.zeros(1, dtype=torch.int64)):
        place, target = known.job.data.path or known.job.data.name, known.fitted.get("target")
        made = target_made_of(known.fitted)
        told = f", which is made of {', '.join(map(repr, made))}" if made else ""
        raise DataError(f"{place}: evaluation needs the target column {target!r}{told}")
