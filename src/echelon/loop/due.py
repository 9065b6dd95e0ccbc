"""At which versions something is due."""

from __future__ import annotations

from echelon.core.config import Job


def is_due(every: object, version: int, since: int | None = None) -> bool:
    """At this version; with `since`, at any after that one. An epoch's own work has its place."""
    if not isinstance(every, int):
        return False
    if since is None:
        return version % every == 0
    return version // every > max(0, since) // every


def next_due(job: Job, version: int) -> int:
    """The next version with work, so that a step in between costs nothing."""
    intervals = (job.track.every, job.evaluate.every, job.checkpoint.every)
    steps = [version - version % n + n for n in intervals if isinstance(n, int)]
    return min(steps if job.steps is None else [*steps, job.steps])


def saves_on_the_way(job: Job, *, evaluates: bool) -> bool:
    """Whether checkpoints are written before the end."""
    looks = evaluates and job.evaluate.every != "never"
    return job.checkpoint.every != "never" or (looks and job.checkpoint.best)
