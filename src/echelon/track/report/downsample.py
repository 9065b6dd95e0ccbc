"""Fewer points that draw the same curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

LIMIT = 1000


def downsample(values: Sequence[float], limit: int = LIMIT) -> list[int]:
    """Which of the points to keep: the ends, and of each stretch its least and greatest value.

    A value that is not finite is an extreme too: the first one of a stretch is kept.
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = (limit - 2) // 3
    edges = [1 + (count - 2) * i // stretches for i in range(stretches + 1)]
    kept = {0, count - 1}
    for start, stop in itertools.pairwise(edges):
        kept |= _extremes(values, start, stop)
    return sorted(kept)


def smoothed(values: Sequence[float], window: float) -> list[float]:
    """The moving average over about `window` points, true from the first point on.

    A value that is not finite leaves a gap and does not spoil what follows.
    """
    keep = 1 - 1 / max(1.0, window)
    total, weight = 0.0, 0.0
    result: list[float] = []
    for value in values:
        if math.isfinite(value):
            total, weight = total * keep + value, weight * keep + 1
        result.append(total / weight if math.isfinite(value) else math.nan)
    return result


def _extremes(values: Sequence[float], start: int, stop: int) -> set[int]:
    finite = [i for i in range(start, stop) if math.isfinite(values[i])]
    kept = {next((i for i in range(start, stop) if not math.isfinite(values[i])), start)}
    if finite:
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return kept
