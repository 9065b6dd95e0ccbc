"""Arrow columns as readers give them, turned into the Arrow columns that shards are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.shards.schema import DTYPES, Field, unsupported

WIDTH = b"width"
"""Key of the field metadata that says how wide a sparse column is."""


def encode_arrow(field: Any, column: Any) -> tuple[Field, Any]:
    """The column in the form it is stored in; refuses missing values that have no number."""
    name, kind = field.name, column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensor(name, column)
    if pa.types.is_dictionary(kind):
        return encode_arrow(field, column.dictionary_decode())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        _no_gaps(name, column)
        return Field(name, "string"), column.cast(pa.large_utf8())
    if pa.types.is_fixed_size_list(kind):
        return _fixed_list(name, column)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list(field, column)
    return _scalar(name, column)


def check_stored(field: Any) -> None:
    """Refuse a column that has no stored form, whatever is in it."""
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
    _number_type(field.name, kind)


def _has_inner(kind: Any) -> bool:
    lists = (pa.types.is_fixed_size_list, pa.types.is_list, pa.types.is_large_list)
    return isinstance(kind, pa.FixedShapeTensorType) or any(test(kind) for test in lists)


def sparse_pairs(kind: Any) -> bool:
    """Whether this is the type of a sparse column."""
    if not pa.types.is_large_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    return [child.name for child in kind.value_type] == ["index", "value"]


def _scalar(name: str, column: Any) -> tuple[Field, Any]:
    if column.null_count and pa.types.is_floating(column.type):
        column = column.fill_null(float("nan"))
    _no_gaps(name, column)
    dtype = _number_type(name, column.type)
    field = Field(name, "dense", dtype)
    return field, column.cast(pa.from_numpy_dtype(field.storage))


def _tensor(name: str, column: Any) -> tuple[Field, Any]:
    _no_gaps(name, column)
    dtype = _number_type(name, column.type.value_type)
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


def _list(field: Any, column: Any) -> tuple[Field, Any]:
    name = field.name
    _no_gaps(name, column)
    if sparse_pairs(column.type):
        return _sparse(field, column)
    inner, values = _scalar(name, column.flatten())
    # `flatten` begins at this slice's first value, its offsets at the whole array's.
    offsets = column.offsets.to_numpy().astype(np.int64)
    array = pa.LargeListArray.from_arrays(pa.array(offsets - offsets[0]), values)
    return Field(name, "sequence", inner.dtype), array


def _sparse(field: Any, column: Any) -> tuple[Field, Any]:
    width = _width(field)
    dtype = _number_type(field.name, column.type.value_type.field("value").type)
    return Field(field.name, "sparse", dtype, width=width), column


def _width(field: Any) -> int:
    metadata = field.metadata or {}
    if WIDTH not in metadata:
        raise DataError(f"column {field.name!r} is sparse, but its field says no width")
    return int(metadata[WIDTH])


def _number_type(name: str, kind: Any) -> str:
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return str(np.dtype(kind.to_pandas_dtype()).name)
    raise unsupported(name, f"of type {kind}", (*DTYPES, "string", "a list of these"))


def _no_gaps(name: str, column: Any) -> None:
    if column.null_count:
        record = column.is_null().to_numpy(zero_copy_only=False).argmax()
        raise DataError(f"column {name!r} has no value in record {record} of its batch")
