"""Becoming a member of a run that is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from echelon import strategy
from echelon import task as tasks
from echelon.cluster.coordinator import read_join_string
from echelon.cluster.elastic_group import ElasticGroup
from echelon.core.config import Job, job_from
from echelon.core.errors import Left, PeerError, RunError
from echelon.core.interfaces import Observer
from echelon.loop import PYTHON_TASK, Result, take_part

JOIN = "join"
"""The file in a run's folder that has its join string."""
_DEADLINE = 30.0
"""Seconds without a word from the coordinator."""


def join(text: str, *, observers: Sequence[Observer] = ()) -> Result:
    """Take part in a run until it ends. `text`: its join string, or its folder on this machine.

    `Left` is raised if a signal asks this process to end: the run goes on without it.
    """
    host, port, key = read_join_string(_string(text))
    group = ElasticGroup((host, port), key, name="joined", number=None, deadline=_DEADLINE)
    with member_of(group, fatal=False) as results:
        about = group.run
        job = job_from(about["job"], checks=[strategy.check])
        task = tasks.load_task(_joinable(job))
        result = take_part(
            job,
            task,
            group,
            run=about["run"],
            store=Path(about["store"]),
            observers=observers,
            newcomer=True,
            guest=True,
        )
        results.append(result)
        return result


@contextmanager
def member_of(group: ElasticGroup, *, fatal: bool) -> Iterator[list[Result]]:
    """Whatever happens inside, the coordinator is told how this member ended: by the result."""
    results: list[Result] = []
    try:
        yield results
        group.leave(results[0].status, over=True)
    except Left as error:
        with suppress(PeerError):
            group.leave(str(error))
        raise
    except BaseException as error:
        with suppress(PeerError):
            group.leave(_words(error), fatal=fatal)
        raise
    finally:
        group.end()


def _words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped at once by a signal"
    return f"{type(error).__name__}: {error}"


def _string(text: str) -> str:
    """The join string, be it given or kept in the run's folder."""
    if "://" in text:
        return text
    path = Path(text) / JOIN
    if not path.is_file():
        raise RunError(
            f"{text!r} is neither a join string (echelon://HOST:PORT/KEY) nor the folder of a run "
            f"that can be joined: there is no {path}"
        )
    return path.read_text(encoding="ascii").strip()


def _joinable(job: Job) -> Job:
    if job.task == PYTHON_TASK:
        raise RunError("this run was started from Python: its task is not known to other processes")
    return job
