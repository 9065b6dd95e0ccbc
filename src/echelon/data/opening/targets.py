"""The column to predict: classes by number, or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.errors import DataError
from echelon.data.opening.frames import Frame

USUAL = ("label", "target", "y", "class")
"""What the column to predict is called where the job does not say."""
MAX_CLASSES = 10_000


def find_target(frame: Frame, name: str | None) -> str:
    """The name of the column to predict."""
    if name is not None:
        frame.column(name, "target column")
        return name
    lower = {column.lower(): column for column in frame.names}
    found = next((lower[usual] for usual in USUAL if usual in lower), None)
    if found is None and frame.names[0] == "column0":
        return "column0"  # a file without names has the label first
    if found is None:
        raise DataError(
            f"{frame.where}: no column is called {', '.join(USUAL)}; set data.target to one of: "
            f"{', '.join(frame.names)}"
        )
    return found


@dataclass(frozen=True, slots=True)
class Classes:
    """The values a class column takes, in order, and what they are called."""

    values: list[Any]
    names: list[str]

    @classmethod
    def fit(cls, frame: Frame, target: str, names: Sequence[str] = ()) -> Classes:
        column = _class_column(frame, target)
        values = sorted(pc.unique(column).to_pylist())
        if len(values) < 2:
            raise DataError(f"{frame.where}: target {target!r} has only one class: {values[0]!r}")
        if len(values) > MAX_CLASSES:
            raise DataError(
                f"{frame.where}: target {target!r} has {len(values)} different values: "
                f"at most {MAX_CLASSES} classes are taken"
            )
        named = values == list(range(len(names)))
        return cls(values, list(names) if named else [str(value) for value in values])

    def encode(self, frame: Frame, target: str) -> np.ndarray[Any, Any]:
        """The number of each record's class."""
        column = _class_column(frame, target)
        numbers = pc.index_in(column, pa.array(self.values, column.type, safe=False))
        if numbers.null_count:
            record = _first(numbers.is_null())
            known = ", ".join(str(value) for value in self.values[:20])
            raise DataError(
                f"{frame.where}: record {record}: class {column[record].as_py()!r} of "
                f"{target!r} was not seen in training (known: {known})"
            )
        encoded: np.ndarray[Any, Any] = numbers.to_numpy().astype(np.int64)
        return encoded


def encode_numbers(frame: Frame, target: str) -> np.ndarray[Any, Any]:
    """A float32 per record."""
    values = frame.array(target).astype(np.float32)
    if values.ndim != 1:
        raise DataError(f"{frame.where}: target {target!r} has several numbers per record")
    wrong = ~np.isfinite(values)
    if wrong.any():
        record = int(wrong.argmax())
        raise DataError(
            f"{frame.where}: record {record}: target {target!r} is {values[record]}, not a number"
        )
    return values


def _class_column(frame: Frame, target: str) -> Any:
    column = frame.column(target, "target column")
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if column.null_count:
        record = _first(column.is_null())
        raise DataError(f"{frame.where}: record {record}: target {target!r} is missing")
    if pa.types.is_floating(kind):
        return _whole_numbers(frame, target, column)
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if not (
        pa.types.is_boolean(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ):
        raise DataError(f"{frame.where}: target {target!r} is of type {kind}: not classes")
    return column


def _whole_numbers(frame: Frame, target: str, column: Any) -> Any:
    values = column.to_numpy()
    fractions = values != np.floor(values)
    if fractions.any():
        record = int(fractions.argmax())
        raise DataError(
            f"{frame.where}: record {record}: target {target!r} is {values[record]}: classes are "
            f"whole numbers or words; a number is for a regression task"
        )
    return column.cast(pa.int64())


def _first(mask: Any) -> int:
    return int(mask.to_numpy().argmax())
