"""Columns in the form that shards store them in, and that form seen as plain memory again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare.columns import Array, Ragged, Sparse, Values
from echelon.data.shards.encode_arrow import encode_arrow
from echelon.data.shards.schema import DTYPES, Field, unsupported

Formed = tuple[Field, Values]


def formed(name: str, values: Values, metadata: Any = None) -> Formed:
    """The field of a column, and its values as they are stored: numbers, or Arrow's text."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        field, column = encode_arrow(pa.field(name, values.type, metadata=metadata), values)
        return field, seen(field, column)
    if isinstance(values, Ragged):
        field = Field(name, "sequence", _dtype(name, values.values))
        return field, Ragged(_stored(field, values.values), values.offsets)
    if isinstance(values, Sparse):
        field = Field(name, "sparse", _dtype(name, values.values), width=values.width)
        _within(name, values)
        indices = np.ascontiguousarray(values.indices, field.index_storage)
        return field, Sparse(indices, _stored(field, values.values), values.offsets, values.width)
    if values.ndim == 0 or 0 in values.shape[1:]:
        raise DataError(f"column {name!r} has shape {list(values.shape)}: its samples are empty")
    field = Field(name, "dense", _dtype(name, values), values.shape[1:])
    return field, _stored(field, values)


def seen(field: Field, column: Any) -> Values:
    """An Arrow column in its stored form as plain memory, without a copy."""
    if field.kind == "string":
        return column
    if field.kind == "dense":
        numbers = column.storage.flatten() if field.shape else column
        return _numbers(numbers, field.storage).reshape(len(column), *field.shape)
    offsets = _offsets(column)
    values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    offsets = offsets - offsets[0]
    if field.kind == "sequence":
        return Ragged(_numbers(values, field.storage), offsets)
    indices = _numbers(values.field("index"), field.index_storage)
    return Sparse(indices, _numbers(values.field("value"), field.storage), offsets, field.width)


def arrow(field: Field, values: Values) -> Any:
    """Values in their stored form as the Arrow column they are stored as."""
    if isinstance(values, Ragged):
        return _listed(values.offsets, pa.array(values.values))
    if isinstance(values, Sparse):
        pairs = pa.StructArray.from_arrays(
            [pa.array(values.indices), pa.array(values.values)], ["index", "value"]
        )
        return _listed(values.offsets, pairs)
    if isinstance(values, np.ndarray):
        if not field.shape:
            return pa.array(values)
        flat = pa.array(values.reshape(-1))
        storage = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(field.shape)))
        return pa.ExtensionArray.from_storage(field.arrow_type(), storage)
    return values


def joined(field: Field, parts: list[Any]) -> Values:
    """The rows of all parts, one after the other."""
    if field.kind == "string":
        return pa.concat_arrays(parts)
    if field.kind == "dense":
        return np.concatenate(parts)
    bounds = np.cumsum([0, *(len(part.values) for part in parts)])
    offsets = np.concatenate(
        [
            parts[0].offsets,
            *(p.offsets[1:] + b for p, b in zip(parts[1:], bounds[1:], strict=False)),
        ]
    )
    values = np.concatenate([part.values for part in parts])
    if field.kind == "sequence":
        return Ragged(values, offsets)
    return Sparse(np.concatenate([p.indices for p in parts]), values, offsets, field.width)


def part(values: Values, start: int, stop: int) -> Values:
    """Consecutive rows, without a copy of their numbers."""
    if isinstance(values, Ragged | Sparse):
        low, high = int(values.offsets[start]), int(values.offsets[stop])
        offsets = values.offsets[start : stop + 1] - low
        if isinstance(values, Ragged):
            return Ragged(values.values[low:high], offsets)
        return Sparse(values.indices[low:high], values.values[low:high], offsets, values.width)
    return values[start:stop]


def _listed(offsets: NDArray[np.int64], values: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _offsets(column: Any) -> NDArray[np.int64]:
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int64, len(column) + 1, column.offset * 8)


def _numbers(column: Any, dtype: np.dtype[Any]) -> Array:
    buffer = column.buffers()[1]
    if buffer is None:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(column), column.offset * dtype.itemsize)


def _stored(field: Field, values: Array) -> Array:
    return np.ascontiguousarray(values.astype(field.storage, copy=False))


def _dtype(name: str, values: Array) -> str:
    if values.dtype.name not in DTYPES:
        raise unsupported(name, f"of type {values.dtype}", DTYPES)
    return values.dtype.name


def _within(name: str, values: Sparse) -> None:
    if len(values.indices) and not 0 <= values.indices.min() <= values.indices.max() < values.width:
        raise DataError(
            f"column {name!r}: indices run from {values.indices.min()} to {values.indices.max()}, "
            f"outside of width {values.width}"
        )
