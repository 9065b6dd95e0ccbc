"""Turns tensors, arrays, lists and Arrow columns into the Arrow columns of a shard.

`encode` takes a whole batch. Values of Python, numpy and torch go through `encode_column`, Arrow
columns, as the readers of files give them, through `encode_arrow`. Memory that already has the
right form is not copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.core.types import Sparse
from echelon.data.shards.layout import DTYPES, Field, Schema, arrow_schema, check_names, unsupported

if TYPE_CHECKING:
    import torch


Values: TypeAlias = Any
"""An array, a tensor, a `Sparse`, a list of strings, a list of arrays (sequences), or an Arrow
array."""
Encoded: TypeAlias = tuple[Field, Any]
"""A column's field and its Arrow array."""
_ACCEPTED = ("array", "tensor", "Sparse", "list of strings", "list of one-dimensional arrays")


def encode(columns: Mapping[str, Values] | pa.RecordBatch) -> tuple[Schema, Any]:
    """Return the schema of these columns and a record batch of them."""
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


def _same_rows(pairs: Sequence[Encoded]) -> None:
    first, rows = pairs[0][0].name, len(pairs[0][1])
    for field, array in pairs[1:]:
        if len(array) != rows:
            raise DataError(
                f"column {field.name!r} has {len(array)} rows, column {first!r} has {rows}"
            )


# Values of Python, numpy and torch


def encode_column(name: str, values: Values) -> Encoded:
    """Return the field of a column and its Arrow array."""
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


def _is_tensor(values: Values) -> bool:
    """Return whether this is a tensor. Does not import torch: without it there are none."""
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
    # numpy makes an empty list float64, which must not turn token numbers into floats.
    typed = [part for part in parts if part.size] or parts
    flat = np.concatenate(typed)
    field = Field(name, "sequence", _number_type(name, flat.dtype))
    offsets = np.cumsum([0, *(len(part) for part in parts)])
    return field, list_array(offsets, pa.array(flat.astype(field.storage, copy=False)))


def _or_refuse(make: Callable[[Any], Any], values: Any, name: str, wanted: str) -> Any:
    try:
        return make(values)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(f"column {name!r} does not hold {wanted} alone: {error}") from None


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


def dense_array(values: np.ndarray[Any, Any]) -> Any:
    """Return an Arrow array with the rows `values[0]`, `values[1]`, …"""
    whole = np.ascontiguousarray(values)
    if whole.ndim == 1:
        return pa.array(whole)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(whole)


def list_array(offsets: np.ndarray[Any, Any], values: Any) -> Any:
    """Return an Arrow list array whose row i is `values[offsets[i]:offsets[i + 1]]`."""
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64, copy=False)), values)


# Arrow columns

WIDTH = b"width"
"""Key of the field metadata with the width of a sparse column."""


def encode_arrow(field: Any, column: Any) -> tuple[Field, Any]:
    """Return a column's field and its stored form. Nulls become NaN in floats, else DataError."""
    name, kind = field.name, column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _arrow_tensor(name, column)
    if pa.types.is_dictionary(kind):
        return encode_arrow(field, column.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _no_gaps(name, column)
        return Field(name, "string"), column.cast(pa.large_utf8())
    if pa.types.is_fixed_size_list(kind):
        return _fixed_list(name, column)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _arrow_list(field, column)
    return _scalar(name, column)


def _scalar(name: str, column: Any) -> tuple[Field, Any]:
    if column.null_count and pa.types.is_floating(column.type):
        column = column.fill_null(float("nan"))
    _no_gaps(name, column)
    dtype = _arrow_number_type(name, column.type)
    field = Field(name, "dense", dtype)
    return field, column.cast(pa.from_numpy_dtype(field.storage))


def _arrow_tensor(name: str, column: Any) -> tuple[Field, Any]:
    _no_gaps(name, column)
    dtype = _arrow_number_type(name, column.type.value_type)
    field = Field(name, "dense", dtype, tuple(column.type.shape))
    if column.type == field.arrow_type():
        return field, column
    return field, pa.FixedShapeTensorArray.from_numpy_ndarray(column.to_numpy_ndarray())


def _fixed_list(name: str, column: Any) -> tuple[Field, Any]:
    _no_gaps(name, column)
    values = column.flatten()
    field, _ = _scalar(name, values)
    plain = np.ascontiguousarray(values.to_numpy(zero_copy_only=False), field.storage)
    rows = plain.reshape(len(column), column.type.list_size)
    shaped = Field(name, "dense", field.dtype, rows.shape[1:])
    return shaped, pa.FixedShapeTensorArray.from_numpy_ndarray(rows)


def _arrow_list(field: Any, column: Any) -> tuple[Field, Any]:
    name = field.name
    _no_gaps(name, column)
    if sparse_pairs(column.type):
        return _arrow_sparse(field, column)
    inner, values = _scalar(name, column.flatten())
    # `flatten` begins at this slice's first value, its offsets at the whole array's.
    offsets = column.offsets.to_numpy().astype(np.int64)
    array = pa.LargeListArray.from_arrays(pa.array(offsets - offsets[0]), values)
    return Field(name, "sequence", inner.dtype), array


def _arrow_sparse(field: Any, column: Any) -> tuple[Field, Any]:
    width = _width(field)
    dtype = _arrow_number_type(field.name, column.type.value_type.field("value").type)
    return Field(field.name, "sparse", dtype, width=width), column


def _width(field: Any) -> int:
    metadata = field.metadata or {}
    if WIDTH not in metadata:
        raise DataError(f"column {field.name!r} is sparse, but its field says no width")
    return int(metadata[WIDTH])


def _no_gaps(name: str, column: Any) -> None:
    if column.null_count:
        record = column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise DataError(f"column {name!r} has no value in record {record} of its batch")


def _arrow_number_type(name: str, kind: Any) -> str:
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return str(np.dtype(kind.to_pandas_dtype()).name)
    raise unsupported(name, f"of type {kind}", (*DTYPES, "string", "a list of these"))


def check_stored(field: Any) -> None:
    """Raise DataError for a column whose type has no stored form."""
    kind = field.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return
    if sparse_pairs(kind):
        _width(field)
        kind = kind.value_type.field("value").type
    elif _has_inner(kind):
        kind = kind.value_type
    _arrow_number_type(field.name, kind)


def sparse_pairs(kind: Any) -> bool:
    """Return whether this is the Arrow type of a sparse column."""
    if not pa.types.is_large_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    return [child.name for child in kind.value_type] == ["index", "value"]


def _has_inner(kind: Any) -> bool:
    lists = (pa.types.is_fixed_size_list, pa.types.is_list, pa.types.is_large_list)
    return isinstance(kind, pa.FixedShapeTensorType) or any(test(kind) for test in lists)
