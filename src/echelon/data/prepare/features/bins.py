"""Numbers as the numbers of bins that hold equally many records each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.data.prepare.columns import Columns, Values
from echelon.data.prepare.features.numbers import Matrix, NumberFeature
from echelon.data.prepare.features.sketch import Summary, apart, partial, quantiles, sketches
from echelon.data.prepare.learnt import Learnt

_FEW = 32


class Bins(NumberFeature):
    """The bin of each value, int64 from 0, between quantiles of train.

    Bounds are exact up to 4,096 different values of a column in a block, and else by a summary
    with a known error (see `sketch`). Bins that would be empty are left out, as in
    scikit-learn's KBinsDiscretizer. What lies below or above all of train is in the first or last
    bin; a missing value is in one of its own, `bins`.
    """

    bins: Annotated[int, Field(ge=2, le=65_536)] = 10

    passes: ClassVar[int] = 1

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        return partial(self.matrix(block).T)

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        summaries = sketches(partials)
        if not summaries or not all(len(summary.values) for summary in summaries):
            names = ", ".join(self.sources)
            raise DataError(f"feature {self.kind}: {names}: no number in any record of train")
        bounds = [bin_bounds(summary, self.bins) for summary in summaries]
        return {
            "bounds": np.concatenate(bounds),
            "sizes": np.array([len(bound) for bound in bounds], np.int64),
        }

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        bounds = apart(learnt["bounds"], learnt["sizes"])
        return self.made(block, binned(self.matrix(block), bounds, self.bins))

    def different(self, learnt: Learnt) -> int:
        return self.bins + 1


def bin_bounds(summary: Summary, bins: int) -> NDArray[np.float64]:
    """The values at which the second and later bins begin."""
    edges = np.unique(quantiles(summary, np.linspace(0, 1, bins + 1)))
    return edges[1:-1]


def binned(
    values: Matrix, bounds: Iterable[NDArray[np.float64]], missing: int
) -> NDArray[np.int64]:
    """The number of each value's bin; `missing` for one that is not there."""
    out = np.empty(values.shape, np.int64)
    for at, bound in enumerate(bounds):
        column = values[:, at]
        out[:, at] = _places(column, bound)
        gaps = np.isnan(column)
        if gaps.any():
            out[gaps, at] = missing
    return out


def _places(column: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[Any]:
    """How many bounds each value reaches."""
    if len(bounds) > _FEW:
        return np.searchsorted(bounds, column, side="right")
    # Of few bounds, to compare with all is several times as fast as to search.
    found = np.zeros(len(column), np.uint8)
    for bound in bounds:
        found += column >= bound
    return found
