"""The part of `echelon train` that needs torch."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echelon import task
from echelon.cli.reopening import check_stored
from echelon.cluster.start import start
from echelon.core.config import Job
from echelon.core.errors import RunError, TaskError, UserError
from echelon.loop import PYTHON_TASK, Result, check_resume, load_run
from echelon.track import progress


def started(job: Job, *, quiet: bool) -> Result:
    """Begin a run."""
    with _no_exit():
        return start(job, task.load_task(job), observers=[progress(quiet=quiet)])


def resumed(run: str, file: Path | None, overrides: list[str], *, quiet: bool) -> Result:
    """Go on with a run as it was, except for what `overrides` say."""
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
    """A task that ends the process, as a script may, has not trained anything to its end."""
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
