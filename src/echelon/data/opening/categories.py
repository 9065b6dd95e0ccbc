"""Fields of a table: which are numbers, which are categories, and the categories' numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.errors import DataError
from echelon.data.opening.frames import Frame


def is_category(kind: Any) -> bool:
    """Whether a column of this type is one of categories."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_dictionary(kind)
        or pa.types.is_boolean(kind)
    )


def tell_apart(
    frame: Frame, features: Sequence[str], categories: Collection[str]
) -> tuple[list[str], list[str]]:
    """The features that are numbers, and those that are categories or said to be."""
    for name in categories:
        if name not in features:
            frame.column(name, "data.options.categories:")
    chosen = [n for n in features if n in categories or is_category(frame.column(n).type)]
    return [name for name in features if name not in chosen], chosen


def learn_categories(frame: Frame, name: str, rows: np.ndarray[Any, Any], size: int) -> list[Any]:
    """At most `size` values of a field, the most frequent of these rows first."""
    column = _plain(frame.column(name)).take(pa.array(rows))
    counts = pc.value_counts(column)
    pairs = zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)
    kept = sorted((-count, value) for value, count in pairs if value is not None)
    return [value for _, value in kept[:size]]


def category_numbers(frame: Frame, categories: Mapping[str, Sequence[Any]]) -> Any:
    """int64 [N, fields]: 1 for a field's most frequent value and so on, 0 for one not seen."""
    columns = [_numbers(frame, name, values) for name, values in categories.items()]
    if not columns:
        return np.zeros((len(frame), 0), np.int64)
    return np.stack(columns, 1)


def _numbers(frame: Frame, name: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    column = _plain(frame.column(name))
    known = pa.array(values)
    if column.type != known.type:
        column = _cast(frame, name, column, known.type)
    found = pc.index_in(column, known)
    numbers: np.ndarray[Any, Any] = pc.add(found, 1).fill_null(0).to_numpy()
    return numbers.astype(np.int64)


def _cast(frame: Frame, name: str, column: Any, kind: Any) -> Any:
    try:
        return column.cast(kind)
    except pa.ArrowException:
        raise DataError(
            f"{frame.where}: column {name!r} is of type {column.type}; in training it was {kind}"
        ) from None


def _plain(column: Any) -> Any:
    """Values of the types that `pa.array` makes of plain data."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_large_string(kind):
        return column.cast(pa.string())
    return column.cast(pa.int64()) if pa.types.is_integer(kind) else column
