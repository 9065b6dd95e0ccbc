"""What the tests of `strategy: sharded` have in common."""

from __future__ import annotations

import functools

from torch import Tensor

from echelon.comm.group import Group
from echelon.core.config.sections import ShardedSection
from echelon.core.types import Parallel

from . import trained
from .jobs import difference

LEVELS = ("optimizer", "gradients", "parameters")
built = functools.partial(trained.built, "sharded")


def arranged(level: str, mesh: dict[str, int] | None = None) -> Parallel:
    return Parallel(mesh=mesh or {}, sharded=ShardedSection(level=level))


def apart(left: dict[str, Tensor], right: dict[str, Tensor], comm: Group) -> float:
    """Only the first member has whole weights."""
    return difference(left, right) if comm.index == 0 else 0.0
