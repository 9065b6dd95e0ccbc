"""`echelon train`: from a job file to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.arguments import command, split_arguments

if TYPE_CHECKING:
    from echelon.core.config import Job
    from echelon.loop import Result

INTERRUPTED = 130
"""A run that was stopped can be resumed, but it is not done."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.yaml] [KEY=VALUE]...",
        show_default=False,
        help="A job file, and settings that go before it: epochs=3 optimizer.lr=1e-4",
    ),
]


def train(
    arguments: Arguments = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run: its id, or `last`.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON object on stdout.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Train a job, or go on with one that was stopped or killed."""
    file, overrides = split_arguments(arguments or [])
    from echelon.cli import training  # torch is imported only when there is work for it
    from echelon.track.text import to_json

    if resume is not None:
        result = training.resumed(resume, file, overrides, quiet=quiet)
    else:
        result = training.started(_load(file, overrides), quiet=quiet)
    if not result.run:  # of the processes that torchrun started, the first tells
        return
    print(to_json(result.summary()) if as_json else _told(result))
    if result.status != "done":
        raise typer.Exit(INTERRUPTED)


def _load(file: Path | None, overrides: list[str]) -> Job:
    from echelon import strategy, task
    from echelon.core.config import load_job

    checks = [task.check, strategy.check]
    job = load_job(file, overrides, checks=checks).job
    return task.anchored(job, file.parent if file is not None else Path())


def _told(result: Result) -> str:
    """What happened, where it is, and what to try next."""
    lines = [
        f"{result.run}: {result.reason}; {result.steps:,} steps, "
        f"{result.samples:,} samples in {result.seconds:.1f} s"
    ]
    if result.metrics:
        figures = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        lines.append(f"held-out: {figures}")
    if result.report:
        lines.append(f"report:   {result.report}")
    me = command()
    if result.status == "stopped":
        lines.append(f"go on:    {me} train --resume {result.run}")
    else:
        lines.append(f"next:     {me} runs show {result.run}")
        lines.append(f"          {me} train --resume {result.run} epochs=…")
        lines.append(f"          {me} train … optimizer.lr=…, then {me} runs compare")
    return "\n".join(lines)
