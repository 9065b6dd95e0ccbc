"""Minimum, maximum, mean and deviation, gathered batch by batch in flat memory.

Numbers are merged as (count, mean, sum of squared deviations), which stays exact where a plain
sum of squares would cancel (Chan, Golub and LeVeque).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_BLOCK = 1 << 20


def feature_groups(shape: tuple[int, ...]) -> int:
    """How many figures a sample of this shape gets: per feature, per channel, or one for all."""
    return shape[0] if len(shape) in (1, 3) else 1


class Moments:
    """Minimum, maximum, mean and deviation per feature of a vector or channel of an image.

    Values that are missing (NaN) or infinite are left out.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        groups = feature_groups(shape)
        self.count = np.zeros(groups)
        self.mean = np.zeros(groups)
        self.squares = np.zeros(groups)
        self.min = np.full(groups, np.inf)
        self.max = np.full(groups, -np.inf)

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Take in samples [N, *shape]."""
        if not values.size:
            return
        per_group = math.prod(self.shape) // max(1, len(self.count))
        rows = max(1, _BLOCK // max(1, math.prod(self.shape)))
        for start in range(0, len(values), rows):
            block = values[start : start + rows]
            grouped = block.reshape(len(block), len(self.count), per_group)
            self._merge(*(_byte_figures(grouped) if block.dtype == np.uint8 else _figures(grouped)))

    def _merge(self, count: Any, mean: Any, squares: Any, low: Any, high: Any) -> None:
        total = self.count + count
        share = np.divide(count, total, out=np.zeros_like(total), where=total > 0)
        gap = mean - self.mean
        self.squares += squares + gap**2 * self.count * share
        self.mean += gap * share
        self.count = total
        self.min = np.minimum(self.min, low)
        self.max = np.maximum(self.max, high)

    def state(self) -> np.ndarray[Any, Any]:
        """All there is, for `merge` in another process: float64 [5, groups]."""
        return np.stack([self.count, self.mean, self.squares, self.min, self.max])

    def merge(self, state: np.ndarray[Any, Any]) -> None:
        """Take in what another one has seen."""
        self._merge(*state)

    @property
    def std(self) -> np.ndarray[Any, Any]:
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    def summary(self) -> dict[str, Any]:
        figures = {"min": self.min, "max": self.max, "mean": self.mean, "std": self.std}
        single = self.shape == () or len(self.count) == 1
        return {
            name: _plain(value[0]) if single else [_plain(number) for number in value]
            for name, value in figures.items()
        }


def _figures(grouped: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Count, mean, squared deviations, minimum and maximum per group of [N, groups, rest]."""
    groups = grouped.shape[1]
    # Each group in one piece: what goes along rows of few numbers takes several times as long.
    values = grouped.transpose(1, 0, 2).astype(np.float64, order="C").reshape(groups, -1)
    present = np.isfinite(values)
    if not present.all():
        rows = [_of_row(row[there]) for row, there in zip(values, present, strict=True)]
        return tuple(np.array(figure) for figure in zip(*rows, strict=True))
    count = np.full(groups, float(values.shape[1]))
    mean, low, high = values.mean(1), values.min(1), values.max(1)
    values -= mean[:, None]
    return count, mean, np.einsum("gn,gn->g", values, values), low, high


def _of_row(row: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """The same for the values of one group that are there."""
    if not row.size:
        return 0.0, 0.0, 0.0, math.inf, -math.inf
    mean = row.mean()
    low, high = row.min(), row.max()
    row -= mean
    return float(row.size), mean, np.einsum("n,n->", row, row), low, high  # BLAS has threads


def _byte_figures(grouped: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """The same for bytes, in whole numbers: exact, and faster."""
    count = np.full(grouped.shape[1], float(grouped.shape[0] * grouped.shape[2]))
    total = grouped.sum(axis=(0, 2), dtype=np.uint64).astype(np.float64)
    squared = grouped.astype(np.uint16)
    squared *= squared
    squares = squared.sum(axis=(0, 2), dtype=np.uint64) - total**2 / count
    return count, total / count, squares, grouped.min(axis=(0, 2)), grouped.max(axis=(0, 2))


def _plain(number: Any) -> float | int | None:
    """A JSON number; whole ones without a point, none at all where nothing was seen."""
    value = float(number)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
