"""`echelon chaos`: a job under faults, and the proof that it stood them."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from echelon.cli import train
from echelon.cli.arguments import say, split_arguments
from echelon.core.errors import UserError

if TYPE_CHECKING:
    from echelon.core.config import Job

FAILED = 1


def chaos(
    arguments: train.Arguments = None,
    workers: Annotated[
        int | None, typer.Option(min=2, help="How many trainers to start (the job's, otherwise).")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help='What goes wrong: "kill trainer:1@step=50; join 1@step=90"'
        ),
    ] = None,
    chance: Annotated[
        int | None, typer.Option("--random", metavar="N", min=1, help="So many random faults.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random faults.")] = 0,
    runs: Annotated[
        int, typer.Option(min=1, help="Runs with random faults, with a seed each.")
    ] = 1,
    reference: Annotated[
        bool, typer.Option(help="Run the job without faults first, to compare with.")
    ] = True,
    patience: Annotated[
        float, typer.Option(min=1.0, help="Seconds without an update that count as a hang.")
    ] = 120.0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="How far weights may be from the fault-free run's.")
    ] = 1e-4,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON object on stdout.")
    ] = False,
) -> None:
    """Run a job under faults on this machine, and show what they cost."""
    if (plan is None) == (chance is None):
        raise UserError("say what is to go wrong: either --plan TEXT or --random N")
    if plan is not None and runs > 1:
        raise UserError("--runs is for random faults: a plan is the same every time")
    from echelon.cluster.chaos import endure, read_plan
    from echelon.cluster.chaos.report import show, show_all
    from echelon.track import text, views

    faults = read_plan(plan) if plan is not None else ()
    file, overrides = split_arguments(arguments or [])
    if workers is not None:
        overrides.append(f"workers={workers}")
    job, overrides = _elastic(file, overrides)
    out = views.console()
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGHUP, _interrupted)
    try:
        report = endure(
            job,
            [*([str(file)] if file else []), *overrides],
            plan=faults,
            chance=chance or 0,
            seeds=range(seed, seed + runs),
            reference=reference,
            patience=patience,
            tolerance=tolerance,
            told=lambda *found: None if as_json else show(out, *found),
        )
    except KeyboardInterrupt:
        raise typer.Exit(train.INTERRUPTED) from None
    if as_json:
        say([text.to_json(report.as_data())])
    else:
        show_all(out, report)
    if report.problems:
        raise typer.Exit(FAILED)


def _elastic(file: Path | None, overrides: list[str]) -> tuple[Job, list[str]]:
    """The job, whose strategy is all_reduce if it does not say any other."""
    from echelon.core.config import load_job

    if load_job(file, overrides).job.strategy == "single":
        overrides = [*overrides, "strategy=all_reduce"]
    return train.load(file, overrides), overrides


def _interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    """As Ctrl-C: nothing that was started is left."""
    raise KeyboardInterrupt
