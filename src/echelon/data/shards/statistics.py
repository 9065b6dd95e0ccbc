"""What a manifest says of each column, gathered batch by batch in flat memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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

    def state(self) -> tuple[Any, Any]:
        """An array and a JSON value that say all there is, for `merge` in another process."""
        ...

    def merge(self, array: Any, plain: Any) -> None: ...


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

    def state(self) -> dict[str, Any]:
        """Arrays and JSON values that say all there is, for `merge` in another process."""
        states = [column.state() for column in self._columns.values()]
        arrays = {f"{at} moments": array for at, (array, _) in enumerate(states)}
        return arrays | {f"{at} plain": plain for at, (_, plain) in enumerate(states)}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in what another one of the same schema has seen."""
        for at, column in enumerate(self._columns.values()):
            column.merge(state[f"{at} moments"], state[f"{at} plain"])

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

    def state(self) -> tuple[Any, Any]:
        counts = None if self._counts is None else list(self._counts.items())
        return self._moments.state(), counts

    def merge(self, array: Any, plain: Any) -> None:
        self._moments.merge(array)
        if self._counts is not None and plain is not None:
            self._counts.update(dict(plain))
        if plain is None or len(self._counts or ()) > MAX_CLASSES:
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

    def state(self) -> tuple[Any, Any]:
        return self._lengths.state(), None

    def merge(self, array: Any, plain: Any) -> None:  # noqa: ARG002 (lengths have no counts)
        self._lengths.merge(array)

    def summary(self) -> dict[str, Any]:
        figures = self._lengths.summary()
        length = {name: figures[name] for name in ("min", "mean", "max")}
        if self._field.kind != "sparse":
            return {"length": length}
        total = round(float(self._lengths.mean[0] * self._lengths.count[0]))
        return {"nnz": total, "length": length}
