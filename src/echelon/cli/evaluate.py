"""`echelon eval`: how good a trained run is."""

from __future__ import annotations

import json
from typing import Annotated

import typer

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

    known, task = reopen(folder, run, overrides or [])
    found = evaluate_run(known, task, checkpoint)
    if as_json:
        print(json.dumps({"run": known.id, "samples": found.samples, "metrics": found.values}))
        return
    figures = ", ".join(f"{name} {value:.4f}" for name, value in found.values.items())
    print(f"{known.id} ({checkpoint}) on {found.samples:,} samples: {figures}")
