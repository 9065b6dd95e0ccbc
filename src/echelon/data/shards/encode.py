"""Columns of any origin, turned into the Arrow arrays that shards are made of.

Nothing is copied where the memory already has the right form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.core.types import Sparse
from echelon.data.shards.encode_arrow import encode_arrow
from echelon.data.shards.schema import DTYPES, Field, Schema, arrow_schema, check_names, unsupported

if TYPE_CHECKING:
    import torch

Values: TypeAlias = Any
"""An array, a tensor, a `Sparse`, a list of strings, a list of arrays (sequences), or Arrow's."""
Encoded: TypeAlias = tuple[Field, Any]
"""A column's field and its Arrow array."""

_ACCEPTED = ("array", "tensor", "Sparse", "list of strings", "list of one-dimensional arrays")


def encode(columns: Mapping[str, Values] | pa.RecordBatch) -> tuple[Schema, Any]:
    """The schema of these columns and a record batch of them."""
    if isinstance(columns, pa.RecordBatch):
        pairs = [
            encode_arrow(field, column)
            for field, column in zip(columns.schema, columns.columns, strict=True)
        ]
    else:
        pairs = [encode_column(name, values) for name, values in columns.items()]
    if not pairs:
        raise DataError("a batch has no columns")
    _same_rows(pairs)
    schema = tuple(field for field, _ in pairs)
    check_names(schema)
    arrays = [array for _, array in pairs]
    return schema, pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema))


def encode_column(name: str, values: Values) -> Encoded:
    if isinstance(values, Sparse):
        return _sparse(name, values)
    if _is_tensor(values):
        return _tensor(name, values)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        whole = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        return encode_arrow(pa.field(name, whole.type), whole)
    if isinstance(values, np.ndarray) and values.dtype != object:
        return _strings(name, values.tolist()) if values.dtype.kind == "U" else _array(name, values)
    if isinstance(values, Sequence | np.ndarray) and not isinstance(values, str | bytes):
        return _list(name, values)
    raise unsupported(name, f"a {type(values).__name__}", _ACCEPTED)


def dense_array(values: np.ndarray[Any, Any]) -> Any:
    """An Arrow array whose rows are `values[0]`, `values[1]`, …"""
    whole = np.ascontiguousarray(values)
    if whole.ndim == 1:
        return pa.array(whole)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(whole)


def list_array(offsets: np.ndarray[Any, Any], values: Any) -> Any:
    """Row i holds `values[offsets[i]:offsets[i + 1]]`."""
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64, copy=False)), values)


def _is_tensor(values: Values) -> bool:
    """Without importing torch: where nobody has, there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def _tensor(name: str, values: torch.Tensor) -> Encoded:
    import torch

    whole = values.detach().cpu().contiguous()
    if whole.dtype == torch.bfloat16:
        field, array = _array(name, whole.view(torch.uint16).numpy())
        return Field(name, "dense", "bfloat16", field.shape), array
    return _array(name, whole.numpy())


def _array(name: str, values: np.ndarray[Any, Any]) -> Encoded:
    dtype = _number_type(name, values.dtype)
    if values.ndim == 0 or 0 in values.shape[1:]:
        raise DataError(f"column {name!r} has shape {list(values.shape)}: its samples are empty")
    field = Field(name, "dense", dtype, values.shape[1:])
    return field, dense_array(values.astype(field.storage, copy=False))


def _number_type(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.name not in DTYPES:
        raise unsupported(name, f"of type {dtype}", list(DTYPES))
    return dtype.name


def _list(name: str, values: Sequence[Any] | np.ndarray[Any, Any]) -> Encoded:
    first = values[0] if len(values) else None
    if isinstance(first, str):
        return _strings(name, list(values))
    if isinstance(first, np.ndarray | Sequence) or _is_tensor(first):
        return _sequence(name, values)
    plain = np.asarray(values)
    if plain.dtype == object:
        raise unsupported(name, f"a list of {type(first).__name__}", _ACCEPTED)
    return _array(name, plain)


def _strings(name: str, values: list[Any]) -> Encoded:
    array = _or_refuse(lambda plain: pa.array(plain, pa.large_utf8()), values, name, "strings")
    return Field(name, "string"), array


def _sequence(name: str, values: Sequence[Any] | np.ndarray[Any, Any]) -> Encoded:
    parts: list[np.ndarray[Any, Any]] = [
        _or_refuse(np.asarray, part, name, "numbers") for part in values
    ]
    for record, part in enumerate(parts):
        if part.ndim != 1:
            raise DataError(
                f"column {name!r}, record {record}: a sequence has one dimension, "
                f"this one has shape {list(part.shape)}"
            )
    # An empty list has no type of its own: it must not turn token numbers into floats.
    typed = [part for part in parts if part.size] or parts
    flat = np.concatenate(typed)
    field = Field(name, "sequence", _number_type(name, flat.dtype))
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    return field, list_array(offsets, pa.array(flat.astype(field.storage, copy=False)))


def _sparse(name: str, values: Sparse) -> Encoded:
    numbers = values.values.detach().cpu().contiguous().numpy()
    indices = values.indices.cpu().numpy()
    offsets = values.offsets.cpu().numpy()
    if len(indices) and not 0 <= indices.min() <= indices.max() < values.width:
        raise DataError(
            f"column {name!r}: indices run from {indices.min()} to {indices.max()}, "
            f"outside of width {values.width}"
        )
    field = Field(name, "sparse", _number_type(name, numbers.dtype), width=values.width)
    pair = [pa.array(indices.astype(field.index_storage)), pa.array(numbers)]
    return field, list_array(offsets, pa.StructArray.from_arrays(pair, ["index", "value"]))


def _or_refuse(make: Callable[[Any], Any], values: Any, name: str, wanted: str) -> Any:
    try:
        return make(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"column {name!r} does not hold {wanted} alone: {error}") from None


def _same_rows(pairs: Sequence[Encoded]) -> None:
    first, rows = pairs[0][0].name, len(pairs[0][1])
    for field, array in pairs[1:]:
        if len(array) != rows:
            raise DataError(
                f"column {field.name!r} has {len(array)} rows, column {first!r} has {rows}"
            )
