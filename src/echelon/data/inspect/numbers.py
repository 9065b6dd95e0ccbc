"""What is told of many numbers: extremes and mean of all, quantiles and histogram of a sample."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from echelon.core.hashing import Words
from echelon.data.inspect.sample import Sample
from echelon.data.moments import Moments

SAMPLED = 65_536
"""Numbers in a sample: the share of numbers below an estimated quantile is off by 0.2 %."""
QUANTILES = (1, 5, 25, 50, 75, 95, 99)
BARS = 40
_FAR = 3
"""So many times the span of the middle 98 % are too far to be drawn."""
_ROWS = 1 << 15
"""Numbers at a time: what they need stays in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of the numbers between edges, as shares of the sample; the ends may be left out."""

    edges: list[float]
    counts: list[int]
    below: int = 0
    above: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """A summary of numbers; `sampled` of them stand for all in what is not exact."""

    count: int
    min: float
    mean: float
    max: float
    std: float
    zeros: int | None
    infinite: int
    sampled: int
    quantiles: dict[int, float]
    histogram: Histogram

    @property
    def exact(self) -> bool:
        """Whether quantiles and histogram are of all numbers."""
        return self.sampled == self.count

    def as_data(self) -> dict[str, Any]:
        data = asdict(self) | {"exact": self.exact}
        data["quantiles"] = {f"p{share}": value for share, value in self.quantiles.items()}
        return data


class Numbers:
    """Numbers of a stream, in flat memory."""

    def __init__(self, size: int = SAMPLED) -> None:
        self._moments = Moments(())
        self._sample = Sample(size)
        self._zeros = 0
        self._infinite = 0

    def add(self, values: np.ndarray[Any, Any], keys: Words) -> None:
        """Take in numbers that are not missing, with the keys of their records."""
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            finite = np.isfinite(values)
            self._infinite += len(values) - int(finite.sum())
            values, keys = values[finite], keys[finite]
        with np.errstate(over="ignore", invalid="ignore"):  # deviations may be too large to square
            for start in range(0, len(values), _ROWS):
                self._moments.add(values[start : start + _ROWS])
        self._zeros += len(values) - int(np.count_nonzero(values))
        rows = self._sample.chosen(keys)
        self._sample.add(keys[rows], values[rows].astype(np.float64))

    def figures(self) -> Figures | None:
        """None where there was not a single finite number."""
        sample = self._sample.values()
        if sample is None or not len(sample):
            return None
        moments = self._moments
        low, high = float(moments.min[0]), float(moments.max[0])
        ordered = np.sort(sample)
        return Figures(
            count=int(moments.count[0]),
            min=low,
            mean=float(moments.mean[0]),
            max=high,
            std=float(moments.std[0]),
            zeros=self._zeros,
            infinite=self._infinite,
            sampled=len(sample),
            quantiles=dict(zip(QUANTILES, _at(ordered, QUANTILES), strict=True)),
            histogram=histogram(ordered, low, high),
        )


def _at(ordered: np.ndarray[Any, Any], shares: tuple[int, ...]) -> list[float]:
    """Quantiles that are values of the sample, not something between two of them."""
    found: list[float] = ordered[[(len(ordered) - 1) * share // 100 for share in shares]].tolist()
    return found


def histogram(ordered: np.ndarray[Any, Any], low: float, high: float) -> Histogram:
    """Bars of equal width; where a few far ones would flatten all others, they are left out."""
    first, last = _at(ordered, (1, 99))
    if high - low > _FAR * (last - first) > 0:
        air = (last - first) / 10
        low, high = max(low, first - air), min(high, last + air)
    edges = _edges(ordered, low, high)
    counts, _ = np.histogram(ordered, edges)
    below = int(np.searchsorted(ordered, edges[0], "left"))
    above = len(ordered) - int(np.searchsorted(ordered, edges[-1], "right"))
    return Histogram(edges.tolist(), counts.tolist(), below, above)


def _edges(ordered: np.ndarray[Any, Any], low: float, high: float) -> np.ndarray[Any, Any]:
    """Whole numbers get bars of whole width, so that no bar has more of them than another."""
    whole = max(abs(low), abs(high)) < 2**52 and bool((ordered == np.floor(ordered)).all())
    if whole:
        width = max(1, math.ceil((high - low + 1) / BARS))
        first = math.floor(low)
        bars = math.ceil((math.floor(high) - first + 1) / width)
        return first - 0.5 + width * np.arange(bars + 1, dtype=np.float64)
    if not high - low > abs(high) * 1e-12:
        air = abs(low) * 0.1 or 0.5
        return np.array([low - air, high + air])
    return np.linspace(low, high, BARS + 1)
