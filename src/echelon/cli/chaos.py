"""`echelon chaos`: inject faults into a run on this machine and verify that it recovers.

The faults come from a plan (`--plan`) or are random (`--random`, one trial per seed).
`cluster.chaos.endure` makes the trials; each is printed when it ends, and all together at the end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from echelon.cli import train
from echelon.cli.common import say, split_arguments
from echelon.core.errors import UserError

if TYPE_CHECKING:
    from echelon.cluster.chaos.plan import Fault
    from echelon.cluster.chaos.run import Report, Told
    from echelon.core.config import Job


FAILED = 1
Workers = Annotated[
    int | None, typer.Option(min=2, help="How many trainers to start (the job's, otherwise).")
]
Plan = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help='What goes wrong: "kill trainer:1@step=50; join 1@step=90"'),
]
Chance = Annotated[
    int | None, typer.Option("--random", metavar="N", min=1, help="So many random faults.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of the random faults.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs with random faults, with a seed each.")]
Reference = Annotated[bool, typer.Option(help="Run the job without faults first, to compare with.")]
Patience = Annotated[
    float, typer.Option(min=1.0, help="Seconds without an update that count as a hang.")
]
Tolerance = Annotated[
    float, typer.Option(min=0.0, help="How far weights may be from the fault-free run's.")
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")]


def chaos(
    arguments: train.Arguments = None,
    workers: Workers = None,
    plan: Plan = None,
    chance: Chance = None,
    seed: Seed = 0,
    runs: Runs = 1,
    reference: Reference = True,
    patience: Patience = 120.0,
    tolerance: Tolerance = 1e-4,
    as_json: AsJson = False,
) -> None:
    """Run a job under faults on this machine, and show what they cost."""
    faults = _planned(plan, chance, runs)
    file, overrides = split_arguments(arguments or [])
    job, overrides = _elastic(file, overrides + ([f"workers={workers}"] if workers else []))

    def trials(told: Told) -> Report:
        from echelon.cluster.chaos import endure

        return endure(
            job,
            [*([str(file)] if file else []), *overrides],
            plan=faults,
            chance=chance or 0,
            seeds=range(seed, seed + runs),
            reference=reference,
            patience=patience,
            tolerance=tolerance,
            told=told,
        )

    if _report(trials, as_json=as_json).problems:
        raise typer.Exit(FAILED)


def _planned(plan: str | None, chance: int | None, runs: int) -> Sequence[Fault]:
    """Return the faults of `--plan`; none if they are random."""
    if (plan is None) == (chance is None):
        raise UserError("say what is to go wrong: either --plan TEXT or --random N")
    if plan is None:
        return ()
    if runs > 1:
        raise UserError("--runs is for random faults: a plan is the same every time")
    from echelon.cluster.chaos import read_plan

    return read_plan(plan)


def _elastic(file: Path | None, overrides: list[str]) -> tuple[Job, list[str]]:
    """Return the job and its overrides; strategy `single`, the default, becomes `all_reduce`."""
    from echelon.core.config import load_job

    if load_job(file, overrides).job.strategy == "single":
        overrides = [*overrides, "strategy=all_reduce"]
    return train.load(file, overrides), overrides


def _report(trials: Callable[[Told], Report], *, as_json: bool) -> Report:
    """Make the trials; print each when it ends, then the report on all of them."""
    from echelon.cluster.chaos.run import show, show_all
    from echelon.core import format
    from echelon.track import views

    out = views.console()
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGHUP, _interrupted)
    report = trials(lambda *found: None if as_json else show(out, *found))
    if as_json:
        say([format.to_json(report.as_data())])
    else:
        show_all(out, report)
    return report


def _interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    """End like on Ctrl-C, so that every process that was started is ended."""
    raise KeyboardInterrupt
