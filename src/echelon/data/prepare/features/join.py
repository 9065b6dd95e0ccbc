"""Columns of numbers side by side: the one input of a model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare.columns import Columns, Ragged, Sparse, Values
from echelon.data.prepare.feature import Feature
from echelon.data.prepare.features.numbers import matrix, named
from echelon.data.prepare.learnt import Learnt


class Join(Feature):
    """float32 rows of all sources, one after the other; sparse if one of them is.

    Missing values stay missing (NaN).
    """

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        named(self)

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        parts = [self._part(name, block) for name in self.sources]
        dense = [part for part in parts if not isinstance(part, Sparse)]
        if len(dense) == len(parts):
            return {self.name: np.concatenate(dense, 1)}
        return {self.name: side_by_side([_as_sparse(part) for part in parts])}

    def _part(self, name: str, block: Columns) -> NDArray[np.float32] | Sparse:
        values = block[name]
        if isinstance(values, Ragged):
            raise DataError(f"feature {self.kind}: column {name!r} has rows of different lengths")
        if isinstance(values, Sparse):
            return values
        return matrix(self.kind, block, [name]).astype(np.float32, order="C")


def _as_sparse(part: NDArray[np.float32] | Sparse) -> Sparse:
    if isinstance(part, Sparse):
        return part
    rows, columns = np.nonzero(part)
    offsets = np.zeros(len(part) + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=len(part)), out=offsets[1:])
    return Sparse(columns, part[rows, columns], offsets, part.shape[1])


def side_by_side(parts: list[Sparse]) -> Sparse:
    """Rows of all parts, one part's columns after the other's."""
    lengths = np.stack([np.diff(part.offsets) for part in parts], 1)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths.sum(1), out=offsets[1:])
    indices = np.empty(offsets[-1], np.int64)
    values = np.empty(offsets[-1], np.float32)
    before = lengths.cumsum(1) - lengths
    width = 0
    for at, part in enumerate(parts):
        # Entry j of the part, in row i, goes to where the row begins plus what is before it.
        shift = offsets[:-1] + before[:, at] - part.offsets[:-1]
        target = np.repeat(shift, lengths[:, at]) + np.arange(len(part.indices))
        indices[target] = part.indices + width
        values[target] = part.values
        width += part.width
    return Sparse(indices, values, offsets, width)
