"""`echelon train`: from a job file to a trained model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.arguments import command, say, split_arguments
from echelon.cli.interrupt import INTERRUPTED
from echelon.core.config.running import TrackSection

if TYPE_CHECKING:
    from echelon.core.config import Job
    from echelon.loop import Result

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
    from echelon.track.text import to_json, warn

    try:
        from echelon.cli import training  # torch is imported only when there is work for it

        if resume is not None:
            result = training.resumed(resume, file, overrides, quiet=quiet)
        else:
            result = training.started(load(file, overrides), quiet=quiet)
    except KeyboardInterrupt as error:  # a second one, or one before the first step
        warn(str(error) or "stopped")
        raise typer.Exit(INTERRUPTED) from None
    if not result.run:  # of the processes that torchrun started, the first tells
        return
    say([to_json(result.summary())] if as_json else _told(result))
    if result.status != "done":
        raise typer.Exit(INTERRUPTED)


def load(file: Path | None, overrides: list[str]) -> Job:
    """The job that these arguments make, checked."""
    from echelon import strategy, task
    from echelon.core.config import load_job

    checks = [task.check, strategy.check]
    job = load_job(file, overrides, checks=checks).job
    return task.anchored(job, file.parent if file is not None else Path())


def _told(result: Result) -> list[str]:
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
    return lines + _hints(result)


def _hints(result: Result) -> list[str]:
    """Commands that can be copied: they say where the run is, unless that is the usual place."""
    me, folder = command(), str(result.folder.parent)
    usual = Path(folder).resolve() == Path(TrackSection().folder).resolve()
    there = "" if usual else f" --folder {shlex.quote(folder)}"
    resume = f"{me} train --resume {result.run}"
    if not usual:
        resume += f" track.folder={shlex.quote(folder)}"
    if result.status == "stopped":
        return [f"go on:    {resume}"]
    return [
        f"next:     {me} runs show {result.run}{there}",
        f"          {resume} {_limit(result.reason)}=…",
        f"          {me} train … optimizer.lr=…, then {me} runs compare{there}",
    ]


def _limit(reason: str) -> str:
    """The setting that ended the run, and that a longer one would have to raise."""
    return next((key for key in ("steps", "minutes") if f" {key} " in reason), "epochs")
