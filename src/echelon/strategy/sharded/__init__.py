"""Members hold a part each of what one process would hold whole."""

from __future__ import annotations

from typing import Any

from echelon.strategy.sharded.gradients_level import GradientsLevel
from echelon.strategy.sharded.optimizer_level import OptimizerLevel

__all__ = ["Sharded"]

LEVELS = {"optimizer": OptimizerLevel, "gradients": GradientsLevel}


def Sharded(numerics, schedule, inspector, parallel):
    return LEVELS[parallel.sharded.level](numerics, schedule, inspector, parallel)
