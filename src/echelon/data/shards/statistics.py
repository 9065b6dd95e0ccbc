"""What a manifest says of each column, gathered batch by batch in flat memory."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import numpy as np
import pyarrow.compute as pc

from echelon.data.moments import Moments
from echelon.data.shards.schema import Field, Schema

MAX_CLASSES = 1000
"""An integer column with more different values than this is no class label."""


class ColumnStatistics(Protocol):
    def add(self, column: Any) -> None:
        """Take in an Arrow column in the form it is stored in."""
        ...

    def summary(self) -> dict[str, Any]: ...


class Statistics:
    """The figures of all columns of a schema."""

    def __init__(self, schema: Schema) -> None:
        self._columns: dict[str, ColumnStatistics] = {
            field.name: _DenseStatistics(field) if field.kind == "dense" else _Lengths(field)
            for field in schema
        }

    def add(self, batch: Any) -> None:
        """Take in a record batch."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self._columns[name].add(column)

    def summary(self) -> dict[str, dict[str, Any]]:
        return {name: column.summary() for name, column in self._columns.items()}


class _DenseStatistics:
    """Moments, and how often each value of an integer column occurs while they are few."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._moments = Moments(field.shape)
        integers = field.shape == () and not field.is_floating
        self._counts: Counter[int] | None = Counter() if integers else None

    def add(self, column: Any) -> None:
        values = column.to_numpy_ndarray() if self._field.shape else column.to_numpy()
        if self._field.dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        self._moments.add(values)
        self._count(values)

    def _count(self, values: Any) -> None:
        if self._counts is None:
            return
        found, counts = np.unique(values, return_counts=True)
        if len(found) <= MAX_CLASSES:
            self._counts.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        if max(len(found), len(self._counts)) > MAX_CLASSES:
            self._counts = None

    def summary(self) -> dict[str, Any]:
        figures = self._moments.summary()
        if self._counts is not None:
            figures["counts"] = {str(value): self._counts[value] for value in sorted(self._counts)}
        return figures


class _Lengths:
    """How long sequences and strings are, or how many numbers sparse rows hold."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._lengths = Moments(())

    def add(self, column: Any) -> None:
        text = self._field.kind == "string"
        lengths = pc.utf8_length(column) if text else pc.list_value_length(column)
        self._lengths.add(lengths.to_numpy())

    def summary(self) -> dict[str, Any]:
        figures = self._lengths.summary()
        length = {name: figures[name] for name in ("min", "mean", "max")}
        if self._field.kind != "sparse":
            return {"length": length}
        total = round(float(self._lengths.mean[0] * self._lengths.count[0]))
        return {"nnz": total, "length": length}
