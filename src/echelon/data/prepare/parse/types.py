"""The types that columns are read as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from echelon.core.errors import DataError

_TEXT = ("string", "str", "text", "utf8", "large_string", "large_utf8")
_SHORT = {"int": "int64", "float": "float64", "time": "timestamp[us]", "date": "date32"}


def arrow_type(name: str, alias: str) -> Any:
    """What the setting of this name calls a type, as Arrow has it; texts have 64-bit offsets."""
    if alias in _TEXT:
        return pa.large_utf8()
    try:
        return pa.type_for_alias(_SHORT.get(alias, alias))
    except (ValueError, TypeError):
        raise DataError(
            f"{name} = {alias!r}: not a type; such as int64, float32, bool, string, "
            f"timestamp[s], date32"
        ) from None


def settled(kind: Any) -> Any:
    """An inferred type as it is kept; a column with nothing in it may get any text later."""
    if pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.large_utf8()
    if pa.types.is_dictionary(kind):
        return settled(kind.value_type)
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(settled(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(inner.name, settled(inner.type)) for inner in kind])
    return kind


def wanted_schema(found: pa.Schema, types: Mapping[str, Any]) -> Any:
    """What a block has, with the recipe's types; what only the recipe has stands at the end."""
    fields = [
        pa.field(inner.name, types.get(inner.name, settled(inner.type)), metadata=inner.metadata)
        for inner in found
    ]
    more = [pa.field(name, kind) for name, kind in types.items() if name not in found.names]
    return pa.schema([*fields, *more])
