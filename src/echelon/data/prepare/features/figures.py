"""Count, mean and squared deviations of groups of records, merged without loss of digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of each group and each of K numbers: `count` [G], `mean` and `squares` [G, K]."""

    count: NDArray[np.float64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def none(cls, *shape: int) -> Figures:
        """Of groups that have no record yet: shape is (…, groups, K)."""
        return cls(np.zeros(shape[:-1]), np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, groups: Whole, size: int, values: NDArray[np.float64]) -> Figures:
        """Of records [N, K] in `size` groups."""
        count = np.bincount(groups, minlength=size).astype(np.float64)
        some = np.maximum(count, 1)[:, None]
        mean = _sums(groups, size, values) / some
        return cls(count, mean, _sums(groups, size, (values - mean[groups]) ** 2))

    def merged(self, other: Figures) -> Figures:
        """Of the records of both (Chan, Golub and LeVeque)."""
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)[..., None]
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap**2 * self.count[..., None] * share
        return Figures(count, self.mean + gap * share, squares)

    def at(self, groups: Any) -> Figures:
        """Of some groups."""
        return Figures(self.count[groups], self.mean[groups], self.squares[groups])

    def put(self, groups: Whole, figures: Figures) -> None:
        """Replace those of some groups."""
        self.count[groups] = figures.count
        self.mean[groups] = figures.mean
        self.squares[groups] = figures.squares


def _sums(groups: Whole, size: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
    sums = [np.bincount(groups, column, size) for column in values.T]
    return np.stack(sums, 1) if sums else np.zeros((size, 0))
