"""What one column holds, gathered batch by batch: single numbers, texts and times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.hashing import Words
from echelon.data.inspect.distinct import Distinct
from echelon.data.inspect.numbers import Figures, Numbers
from echelon.data.inspect.profile import ColumnProfile
from echelon.data.inspect.sample import Sample, record_keys
from echelon.data.readers.delimited import MISSING

_BLANK = pa.array(MISSING)
_WORDS = 4096
"""Texts whose words are counted: that takes longer than all the rest."""


class Look:
    """A column of a kind that nothing more is known of; others build on it."""

    kind = "other"

    def __init__(self, field: Any) -> None:
        self.field = field
        self.seen = 0
        self.missing = 0

    def add(self, column: Any, keys: Words) -> None:
        """Take in a column of a batch, with the keys of its records."""
        self.seen += len(column)
        if column.null_count:
            self.missing += column.null_count
            keys = keys[column.is_valid().to_numpy(zero_copy_only=False)]
            column = column.drop_null()
        if len(column):
            self._take(column, keys)

    def fits(self, field: Any) -> bool:  # noqa: ARG002
        """Whether values of this type, which has the same kind, can stand beside those before."""
        return True

    def profile(self, records: int) -> ColumnProfile:
        """What was found; where the column is absent in some files it is missing."""
        missing = self.missing + records - self.seen
        return ColumnProfile(
            self.field.name, self.kind, self.type_name(), records, missing, **self._found()
        )

    def type_name(self) -> str:
        return str(self.field.type)

    def _take(self, column: Any, keys: Words) -> None:
        """Values without missing ones."""

    def _found(self) -> dict[str, Any]:
        return {}


class EmptyLook(Look):
    """Nothing but missing values."""

    kind = "empty"


class NumberLook(Look):
    kind = "number"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self._numbers = Numbers()
        self._kind = _counted_as(field.type)
        self._distinct = Distinct(self._kind)

    def fits(self, field: Any) -> bool:
        return bool(pa.types.is_boolean(field.type) == pa.types.is_boolean(self._kind))

    def _take(self, column: Any, keys: Words) -> None:
        if column.type != self._kind:  # another file may have other numbers
            if pa.types.is_floating(column.type) and pa.types.is_integer(self._kind):
                self._kind = self._distinct.kind = pa.float64()
            column = column.cast(self._kind, safe=False)
        values = column.to_numpy(zero_copy_only=False)
        if values.dtype.kind == "f" and np.isnan(values).any():
            there = ~np.isnan(values)
            self.missing += len(values) - int(there.sum())
            values, keys = values[there], keys[there]
            column = pa.array(values)
        self._distinct.add(column)
        self._numbers.add(values.view(np.uint8) if values.dtype == bool else values, keys)

    def _found(self) -> dict[str, Any]:
        return {"numbers": self._numbers.figures(), **counted(self._distinct)}


def _counted_as(kind: Any) -> Any:
    """A type of numbers that all kernels know."""
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_decimal(kind):
        return pa.float64()
    return pa.float32() if pa.types.is_float16(kind) else kind


class TextLook(Look):
    kind = "text"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self._distinct = Distinct(pa.large_utf8())
        self._lengths = Numbers()
        self._words = Sample(_WORDS)
        self._blank = 0

    def type_name(self) -> str:
        return "string"  # however long its offsets are

    def _take(self, column: Any, keys: Words) -> None:
        lengths = pc.utf8_length(column).to_numpy()
        self._blank += pc.is_in(column, value_set=_BLANK).true_count
        self._lengths.add(lengths, keys)
        self._distinct.add(column)
        rows = self._words.chosen(keys)
        if len(rows):
            chosen = column if len(rows) == len(column) else column.take(pa.array(rows))
            self._words.add(keys[rows], _words(chosen))

    def _found(self) -> dict[str, Any]:
        return {
            "blank": self._blank,
            "lengths": self._lengths.figures(),
            "words": of_sample(self._words.values(), self.seen - self.missing),
            **counted(self._distinct),
        }


def _words(texts: Any) -> np.ndarray[Any, Any]:
    """How many words each text has, between spaces."""
    texts = pc.utf8_trim_whitespace(texts)
    words = pc.list_value_length(pc.utf8_split_whitespace(texts)).to_numpy()
    return np.where(pc.binary_length(texts).to_numpy() == 0, 0, words)


class BytesLook(Look):
    kind = "bytes"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self._distinct = Distinct(pa.large_binary())
        self._lengths = Numbers()

    def _take(self, column: Any, keys: Words) -> None:
        self._lengths.add(pc.binary_length(column).to_numpy(), keys)
        self._distinct.add(column)

    def _found(self) -> dict[str, Any]:
        return {"lengths": self._lengths.figures(), **counted(self._distinct)}


class TimeLook(Look):
    kind = "time"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self._distinct = Distinct(field.type)
        self._ends: list[Any] = []

    def _take(self, column: Any, keys: Words) -> None:  # noqa: ARG002
        if column.type != self.field.type:
            column = column.cast(self.field.type, safe=False)
        self._distinct.add(column)
        ends = pc.min_max(pa.chunked_array([column, *self._ends]))
        self._ends = [pa.array([ends["min"].as_py(), ends["max"].as_py()], column.type)]

    def _found(self) -> dict[str, Any]:
        ends = self._ends[0].to_pylist() if self._ends else None
        span = (str(ends[0]), str(ends[1])) if ends is not None else None
        return {"span": span, **counted(self._distinct)}


def counted(distinct: Distinct) -> dict[str, Any]:
    """How many different values, and how often each occurs, the most frequent first."""
    counts = distinct.counts
    return {
        "distinct": distinct.count(),
        "counts": None if counts is None else dict(counts.most_common()),
    }


def of_sample(values: Any, total: int) -> Figures | None:
    """Figures of a sample of a larger whole."""
    if values is None:
        return None
    numbers = Numbers(len(values) or 1)
    numbers.add(values, record_keys(0, len(values)))
    figures = numbers.figures()
    return None if figures is None else replace(figures, count=total, zeros=None)
