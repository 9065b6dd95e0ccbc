"""Strategies by name, and whether a job fits its strategy.

A new strategy is one file and one row of `ROWS`. `check` refuses settings that a strategy cannot
fulfill; `remarks` reports settings for several members that have no effect under it.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from echelon.core.config import Axis, Job
from echelon.core.errors import ConfigError, unknown
from echelon.core.interfaces import Inspector, Schedule, Strategy, Task
from echelon.core.types import Numerics, Parallel


class Row(NamedTuple):
    """Where a strategy's class is, and its own axis of the mesh."""

    module: str
    kind: str
    axis: Axis | None
    elastic: bool = False
    """Whether the others can continue when a member is lost."""
    servers: bool = False
    """Whether weights and optimizer are in server processes."""


ROWS = {
    "single": Row("single", "Single", None),
    "pipeline": Row("pipeline", "Pipeline", "pipeline"),
    "all_reduce": Row("all_reduce", "AllReduce", "data", elastic=True),
    "sharded": Row("sharded", "Sharded", "sharded", elastic=True),
    "tensor": Row("tensor", "TensorParallel", "tensor"),
    "parameter_server": Row(
        "parameter_server", "ParameterServer", "data", elastic=True, servers=True
    ),
}


def build(
    name: str,
    numerics: Numerics,
    schedule: Schedule,
    inspector: Inspector | None = None,
    parallel: Parallel | None = None,
) -> Strategy:
    """Create a strategy that is not set up yet."""
    row = ROWS[name]
    kind = getattr(importlib.import_module(f"echelon.strategy.{row.module}"), row.kind)
    strategy: Strategy = kind(numerics, schedule, inspector, parallel)
    return strategy


def names() -> list[str]:
    return sorted(ROWS)


def sections() -> list[str]:
    """Return the sections of a job that are for one strategy only; they have its name."""
    return [name for name in names() if name in Job.model_fields]


def has_servers(job: Job) -> bool:
    """Return whether this job's weights are in server processes."""
    return ROWS[job.strategy].servers


def can_do_without(job: Job) -> bool:
    """Return whether this job continues when a member is lost."""
    return ROWS[job.strategy].elastic and job.elastic.enabled is not False


def arrangement(job: Job, members: int | None = None) -> dict[str, int]:
    """Return the number of members along each axis of the mesh, the outermost first.

    If there are more or fewer `members` than planned, the `data` axis changes. If they cannot be
    divided evenly, all are along the strategy's own axis.
    """
    axis = ROWS[job.strategy].axis
    if axis is None:
        return {}
    members = members or job.workers
    along = job.mesh.get(axis, 1)
    if not job.mesh or axis == "data" or members % along:
        return {axis: members}
    return {"data": members // along, axis: along}


# Checks: does a job fit its strategy?


def check(job: Job) -> None:
    """Refuse a strategy that does not exist or cannot run with these workers and settings."""
    if job.strategy not in ROWS:
        raise ConfigError(unknown("strategy", job.strategy, ROWS), ("strategy",))
    _check_members(job)
    _check_elastic(job)
    _check_sections(job)
    _check_batch(job)


def check_task(job: Job, task: Task) -> None:
    """Refuse a task that this strategy cannot train."""
    if has_servers(job) and task.optimizer is not None:
        raise ConfigError(OWN_OPTIMIZER, ("strategy",))
    if job.parameter_server.merit.policy != "none" and task.valid is None:
        raise ConfigError(
            "parameter_server.merit needs held-out samples, and this task has none",
            ("parameter_server", "merit", "policy"),
        )


OWN_OPTIMIZER = (
    "the task brings its own optimizer, but under a parameter server it is the servers that apply "
    "gradients: set `optimizer` in the job instead"
)


def _check_members(job: Job) -> None:
    axis = ROWS[job.strategy].axis
    if axis is None and job.workers != 1:
        several = ", ".join(name for name in names() if ROWS[name].axis is not None)
        raise ConfigError(
            f"workers = {job.workers}: strategy {job.strategy!r} is one process (of several are: "
            f"{several})",
            ("workers",),
        )
    known = {axis, "data"} - {None}
    if idle := [name for name in job.mesh if name not in known]:
        raise ConfigError(
            f"mesh axis {idle[0]!r} has no effect with strategy {job.strategy!r} "
            f"(its axes: {', '.join(sorted(map(str, known))) or 'none'})",
            ("mesh", idle[0]),
        )


def _check_elastic(job: Job) -> None:
    if job.elastic.enabled and not ROWS[job.strategy].elastic:
        able = ", ".join(name for name, row in ROWS.items() if row.elastic)
        raise ConfigError(
            f"elastic.enabled has no effect with strategy {job.strategy!r} (it has with {able})",
            ("elastic", "enabled"),
        )
    if has_servers(job) and job.elastic.enabled is False:
        raise ConfigError(
            f"elastic.enabled = false has no effect with strategy {job.strategy!r}: its trainers "
            f"can always do without each other",
            ("elastic", "enabled"),
        )


def _check_sections(job: Job) -> None:
    for name in sections():
        if name != job.strategy and (given := _given(job, name)):
            raise ConfigError(
                f"{name}.{given[0]} has no effect with strategy {job.strategy!r}", (name, given[0])
            )


def _check_batch(job: Job) -> None:
    """Refuse a batch that is too small for every member to get a part of it."""
    along = arrangement(job)
    readers = along.get("data", 1) * along.get("sharded", 1)
    if has_servers(job):
        readers = job.parameter_server.pushes(job.workers)
    if job.batch_size < readers:
        raise ConfigError(
            f"batch_size = {job.batch_size}: {readers} members share each batch, "
            f"so it needs as many samples at least",
            ("batch_size",),
        )
    largest = -(-job.batch_size // (readers * job.accumulate))
    if job.pipeline.micro is not None and job.pipeline.micro > largest:
        raise ConfigError(
            f"pipeline.micro = {job.pipeline.micro}, but no more than {largest} samples of a batch "
            f"of {job.batch_size} go through a pipeline at once",
            ("pipeline", "micro"),
        )


def remarks(job: Job) -> list[str]:
    """Return messages about settings for several members that this strategy does not use."""
    row = ROWS[job.strategy]
    idle = {"sync": row.axis is None, "elastic": not row.elastic}
    return [
        f"{name}.{key} has no effect with strategy {job.strategy!r}"
        for name in idle
        if idle[name]
        for key in _given(job, name)
        if (name, key) != ("elastic", "enabled")  # `false` is true of these strategies anyway
    ]


def _given(job: Job, section: str) -> list[str]:
    """Return the keys of a section that differ from the defaults."""
    return list(getattr(job, section).model_dump(exclude_defaults=True))
