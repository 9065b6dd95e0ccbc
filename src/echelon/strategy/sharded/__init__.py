"""Sharded data parallelism: each member holds a part of what all-reduce replicates."""

from __future__ import annotations

from echelon.core.interfaces import Inspector, Schedule, Strategy
from echelon.core.types import Numerics, Parallel

__all__ = ["Sharded"]


def by_level(
    numerics: Numerics,
    schedule: Schedule,
    inspector: Inspector | None = None,
    parallel: Parallel | None = None,
) -> Strategy:
    """Return the strategy for `sharded.level`. Import only its module: torch's FSDP is large."""
    parallel = parallel or Parallel()
    match parallel.sharded.level:
        case "optimizer":
            from echelon.strategy.sharded.strategy import OptimizerLevel

            return OptimizerLevel(numerics, schedule, inspector, parallel)
        case "gradients":
            from echelon.strategy.sharded.strategy import GradientsLevel

            return GradientsLevel(numerics, schedule, inspector, parallel)
        case "parameters":
            from echelon.strategy.sharded.parameters import ParametersLevel

            return ParametersLevel(numerics, schedule, inspector, parallel)


Sharded = by_level
