"""Features without arithmetic: join columns to the one input of a model; read sparse rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.data.prepare.features.numbers import matrix, named
from echelon.data.prepare.steps import MADE, Columns, Feature, Ragged, Sparse, Values
from echelon.data.prepare.workdir import Learnt


class Join(Feature):
    """float32 rows of all sources side by side; sparse if one of them is. Missing values: NaN."""

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
    """Concatenate sparse rows: the columns of one part after those of the other."""
    lengths = np.stack([np.diff(part.offsets) for part in parts], 1)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths.sum(1), out=offsets[1:])
    indices = np.empty(offsets[-1], np.int64)
    values = np.empty(offsets[-1], np.float32)
    before = lengths.cumsum(1) - lengths
    width = 0
    for at, part in enumerate(parts):
        # An entry of the part moves by where its row begins plus the row's entries of parts before.
        shift = offsets[:-1] + before[:, at] - part.offsets[:-1]
        target = np.repeat(shift, lengths[:, at]) + np.arange(len(part.indices))
        indices[target] = part.indices + width
        values[target] = part.values
        width += part.width
    return Sparse(indices, values, offsets, width)


class SparseRows(Feature):
    """Sparse float32 rows from lists of (index, value) pairs, as libsvm files have them.

    The number of columns is `width`, or by default that of train; entries beyond are dropped. A
    missing list is a row of zeros.
    """

    width: Annotated[int, Field(ge=1)] | None = None

    @property
    def looks(self) -> int:
        return 0 if self.width else 1

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        (name,) = self.sources
        kind = names[name]
        if kind != MADE and not _pairs(kind):
            raise DataError(
                f"feature {self.kind}: column {name!r} is of type {kind}: it must be lists of "
                f"(index, value) pairs"
            )

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        indices, _, _ = self._parts(block)
        return {"width": int(indices.max(initial=-1)) + 1}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        width = max((partial["width"] for partial in partials), default=0)
        if not width:
            raise DataError(f"feature {self.kind}: train has nothing but zeros")
        return {"width": width}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        indices, values, offsets = self._parts(block)
        width = self.width or learnt["width"]
        kept = indices < width
        if not kept.all():
            offsets = np.concatenate([[0], kept.cumsum()])[offsets]
            indices, values = indices[kept], values[kept]
        return {self.name: Sparse(indices, values, offsets, width)}

    def _parts(self, block: Columns) -> tuple[Any, Any, Any]:
        column: Any = block[self.sources[0]]
        # Arrow may keep entries of rows that are null, or before the first one.
        lengths = column.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        starts = column.offsets.to_numpy().astype(np.int64)[:-1]
        offsets = np.concatenate([[0], lengths.cumsum()])
        at = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        pairs = column.values
        indices = pairs.field("index").to_numpy(zero_copy_only=False)[at]
        values = pairs.field("value").to_numpy(zero_copy_only=False)[at].astype(np.float32)
        return indices, values, offsets


def _pairs(kind: pa.DataType) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    inner = kind.value_type
    return pa.types.is_struct(inner) and {field.name for field in inner} == {"index", "value"}
