"""Strategies by name: a new one is one file and one row."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from echelon.core.config import Axis, Job
from echelon.core.interfaces import Inspector, Schedule, Strategy
from echelon.core.types import Numerics, Parallel


class Row(NamedTuple):
    """Where a strategy is, and the axis of the mesh that is its own."""

    module: str
    kind: str
    axis: Axis | None
    elastic: bool = False
    """Whether members can go on without one that is lost."""
    servers: bool = False
    """Whether weights and optimizer live in processes of their own."""


ROWS = {
    "single": Row("single", "Single", None),
    "pipeline": Row("pipeline", "Pipeline", "pipeline"),
    "all_reduce": Row("all_reduce", "AllReduce", "data", elastic=True),
    "sharded": Row("sharded", "Sharded", "sharded", elastic=True),
    "tensor": Row("tensor", "Tensor", "tensor"),
    "parameter_server": Row(
        "parameter_server", "ParameterServer", "data", elastic=True, servers=True
    ),
}


def names() -> list[str]:
    return sorted(ROWS)


def sections() -> list[str]:
    """Parts of a job that are for one strategy alone: they have its name."""
    return [name for name in names() if name in Job.model_fields]


def has_servers(job: Job) -> bool:
    """Whether this job's weights live in server processes."""
    return ROWS[job.strategy].servers


def can_do_without(job: Job) -> bool:
    """Whether members of this job can do without each other, and are to."""
    return ROWS[job.strategy].elastic and job.elastic.enabled is not False


def arrangement(job: Job, members: int | None = None) -> dict[str, int]:
    """Members along each axis, the outermost first; `members` if there are not as many as planned.

    Then there are fewer or more along `data`; where that does not come out even, all are along
    the strategy's own axis.
    """
    axis = ROWS[job.strategy].axis
    if axis is None:
        return {}
    members = members or job.workers
    along = job.mesh.get(axis, 1)
    if not job.mesh or axis == "data" or members % along:
        return {axis: members}
    return {"data": members // along, axis: along}


def build(
    name: str,
    numerics: Numerics,
    schedule: Schedule,
    inspector: Inspector | None = None,
    parallel: Parallel | None = None,
) -> Strategy:
    """A strategy, not yet set up."""
    row = ROWS[name]
    kind = getattr(importlib.import_module(f"echelon.strategy.{row.module}"), row.kind)
    strategy: Strategy = kind(numerics, schedule, inspector, parallel)
    return strategy
