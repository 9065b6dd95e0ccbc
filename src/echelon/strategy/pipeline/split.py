"""Where a chain of layers is cut into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from echelon.core.errors import ConfigError, unknown
from echelon.strategy.pipeline.cost import Cost

_AT = ("pipeline", "split")


def balanced(costs: Sequence[Cost], stages: int) -> list[int]:
    """Where each stage begins, so that the slowest of them is as fast as can be.

    Among cuts that are as good, the one whose other stages are the most even.
    """
    until = [0.0, *accumulate(cost.seconds for cost in costs)]
    count = len(costs)

    def time(start: int, stop: int) -> float:
        passing = costs[stop - 1].passing if stop < count else 0.0
        return until[stop] - until[start] + passing

    # best[stop]: (slowest stage, Σ time², beginnings) of the layers before `stop`
    best = [(time(0, stop), time(0, stop) ** 2, [0]) for stop in range(1, count + 1)]
    best = [(math.inf, math.inf, []), *best]
    for stage in range(2, stages + 1):
        best = [
            min(
                (
                    (
                        max(best[start][0], time(start, stop)),
                        best[start][1] + time(start, stop) ** 2,
                        [*best[start][2], start],
                    )
                    for start in range(stage - 1, stop)
                ),
                default=(math.inf, math.inf, []),
            )
            for stop in range(count + 1)
        ]
    slowest, _, starts = best[count]
    if not math.isfinite(slowest):
        raise ConfigError(
            f"the model cannot be cut into {stages} stages: between too many of its layers "
            f"passes something else than one tensor",
            ("mesh", "pipeline"),
        )
    return starts


def by_names(layers: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Where each stage begins, as the user says. A chain's name means its first layer."""
    starts = [0]
    for name in wanted:
        found = [at for at, layer in enumerate(layers) if f"{layer}.".startswith(f"{name}.")]
        if not found:
            raise ConfigError(unknown("pipeline.split: layer", name, layers), _AT)
        starts.append(found[0])
    for before, after in pairwise(starts):
        if after <= before:
            raise ConfigError(
                f"pipeline.split: layer {layers[after]!r} does not come after "
                f"{layers[before]!r}, where the stage before it begins "
                f"(layers: {', '.join(layers)})",
                _AT,
            )
    return starts
