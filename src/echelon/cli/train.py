"""`echelon train` and `echelon join`: start a run, resume one, or add a worker to one.

    echelon train job.yaml key=value …        load ─▶ started
    echelon train --resume RUN key=value …    resumed: the run's own job with overrides
    echelon join URL                          a process that becomes one of the run's workers

`train` ends with a summary of the run and with commands to go on with.
"""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.common import INTERRUPTED, command, say, split_arguments
from echelon.cli.predict import check_stored
from echelon.core.config import Job
from echelon.core.config.sections import TrackSection
from echelon.core.errors import Left, RunError, TaskError, UserError

if TYPE_CHECKING:
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
    from echelon.core.format import to_json, warn

    try:
        if resume is not None:
            result = resumed(resume, file, overrides, quiet=quiet)
        else:
            result = started(load(file, overrides), quiet=quiet)
    except KeyboardInterrupt as error:  # a second Ctrl-C, or one before the first step
        warn(str(error) or "stopped")
        raise typer.Exit(INTERRUPTED) from None
    if not result.run:  # one of several processes that torchrun started; only the first reports
        return
    say([to_json(result.summary())] if as_json else _summary(result))
    if result.status != "done":
        raise typer.Exit(INTERRUPTED)


def load(file: Path | None, overrides: list[str]) -> Job:
    """Return the checked job that a file and overrides make."""
    from echelon import strategy, task
    from echelon.core.config import load_job

    checks = [task.check, strategy.check]
    job = load_job(file, overrides, checks=checks).job
    return task.anchored(job, file.parent if file is not None else Path())


def started(job: Job, *, quiet: bool) -> Result:
    """Start a run of this job and wait for its end."""
    from echelon import task
    from echelon.cluster.start import start
    from echelon.track import progress

    with _no_exit():
        return start(job, task.load_task(job), observers=[progress(quiet=quiet)])


def resumed(run: str, file: Path | None, overrides: list[str], *, quiet: bool) -> Result:
    """Resume a run with its own job, changed by `overrides`, and wait for its end."""
    from echelon import task
    from echelon.cluster.start import start
    from echelon.loop import PYTHON_TASK, check_resume, load_run
    from echelon.track import progress

    if file is not None:
        raise UserError(f"--resume takes the run's own config: leave out {file}")
    known = load_run(_folder(overrides), run, overrides, checks=[check_stored])
    check_resume(known, known.job)
    if known.job.task == PYTHON_TASK:
        raise RunError(
            f"run {known.id!r} was started from Python: resume it there, with "
            f"echelon.train(task, resume={known.id!r})"
        )
    with _no_exit():
        built = task.load_task(known.job)
        return start(known.job, built, resume=known.id, observers=[progress(quiet=quiet)])


@contextmanager
def _no_exit() -> Iterator[None]:
    """Turn a task's call of `exit()` into an error with file and line: its run is not complete."""
    try:
        yield
    except SystemExit as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskError(
            f"{at.filename}:{at.lineno}: the task called exit({error.code!r})"
        ) from None


def _folder(overrides: list[str]) -> str:
    given = [text.partition("=")[2] for text in overrides if text.startswith("track.folder=")]
    return given[-1] if given else "runs"


def _summary(result: Result) -> list[str]:
    """Return lines on how the run ended, where its report is, and what to do next."""
    lines = [
        f"{result.run}: {result.reason}; {result.steps:,} steps, "
        f"{result.samples:,} samples in {result.seconds:.1f} s"
    ]
    if result.metrics:
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        lines.append(f"held-out: {metrics}")
    if result.report:
        lines.append(f"report:   {result.report}")
    return lines + _hints(result)


def _hints(result: Result) -> list[str]:
    """Return commands that can be copied. They name the folder unless it is the default one."""
    me, folder = command(), str(result.folder.parent)
    is_default = Path(folder).resolve() == Path(TrackSection().folder).resolve()
    there = "" if is_default else f" --folder {shlex.quote(folder)}"
    resume = f"{me} train --resume {result.run}"
    if not is_default:
        resume += f" track.folder={shlex.quote(folder)}"
    if result.status == "stopped":
        return [f"go on:    {resume}"]
    return [
        f"next:     {me} runs show {result.run}{there}",
        f"          {resume} {_limit(result.reason)}=…",
        f"          {me} train … optimizer.lr=…, then {me} runs compare{there}",
    ]


def _limit(reason: str) -> str:
    """Return the setting that ended the run; a longer run has to raise it."""
    return next((key for key in ("steps", "minutes") if f" {key} " in reason), "epochs")


def join(
    run: Annotated[
        str,
        typer.Argument(
            metavar="URL|FOLDER",
            help="The run's join string (echelon://HOST:PORT/KEY), or its folder on this machine.",
        ),
    ],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Help with a run that is under way: this process becomes one of its members."""
    from echelon.cluster import start as joining  # torch is imported only when there is work for it
    from echelon.track import progress

    try:
        result = joining.join(run, observers=[progress(quiet=quiet)])
    except Left as error:
        print(f"{error}; the run goes on")
        raise typer.Exit(INTERRUPTED) from None
    print(f"{result.reason}; {result.steps:,} steps of the run")
