"""Statistics of columns, gathered batch by batch in constant memory and merged across processes.

`Statistics` makes the statistics that a manifest has for each column. They are built on `Moments`:
minimum, maximum, mean and standard deviation, merged as (count, mean, sum of squared deviations),
which stays exact where a plain sum of squares would cancel (Chan, Golub and LeVeque).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow.compute as pc

from echelon.data.shards.layout import Field, Schema, float32_of_bfloat16

MAX_CLASSES = 1000
"""Values of an integer column are counted only up to this many, as those of class labels."""


class Statistics:
    """The statistics of all columns of a schema."""

    def __init__(self, schema: Schema) -> None:
        self._columns: dict[str, ColumnStatistics] = {
            field.name: _DenseStatistics(field) if field.kind == "dense" else _Lengths(field)
            for field in schema
        }

    def add(self, batch: Any) -> None:
        """Add a record batch."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self._columns[name].add(column)

    def state(self) -> dict[str, Any]:
        """Return the complete state as arrays and JSON values, for `merge` in another process."""
        states = [column.state() for column in self._columns.values()]
        arrays = {f"{at} moments": array for at, (array, _) in enumerate(states)}
        return arrays | {f"{at} plain": plain for at, (_, plain) in enumerate(states)}

    def merge(self, state: Mapping[str, Any]) -> None:
        """Add the state of statistics with the same schema."""
        for at, column in enumerate(self._columns.values()):
            column.merge(state[f"{at} moments"], state[f"{at} plain"])

    def summary(self) -> dict[str, dict[str, Any]]:
        return {name: column.summary() for name, column in self._columns.items()}


class ColumnStatistics(Protocol):
    def add(self, column: Any) -> None:
        """Add an Arrow column in its stored form."""
        ...

    def summary(self) -> dict[str, Any]: ...

    def state(self) -> tuple[Any, Any]:
        """Return the complete state as an array and a JSON value, for `merge`."""
        ...

    def merge(self, array: Any, plain: Any) -> None: ...


class _DenseStatistics:
    """Moments, and the counts of an integer column's values up to `MAX_CLASSES`."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._moments = Moments(field.shape)
        integers = field.shape == () and not field.is_floating
        self._counts: Counter[int] | None = Counter() if integers else None

    def add(self, column: Any) -> None:
        values = column.to_numpy_ndarray() if self._field.shape else column.to_numpy()
        if self._field.dtype == "bfloat16":
            values = float32_of_bfloat16(values)
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
    """Lengths of sequences and strings, or entries per sparse row."""

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


_BLOCK = 1 << 20
"""Numbers that `Moments.add` converts to float64 at a time."""


class Moments:
    """Minimum, maximum, mean and deviation per feature of a vector or channel of an image.

    NaN and infinite values are left out.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        groups = feature_groups(shape)
        self.count = np.zeros(groups)
        self.mean = np.zeros(groups)
        self.squares = np.zeros(groups)
        self.min = np.full(groups, np.inf)
        self.max = np.full(groups, -np.inf)

    def add(self, values: np.ndarray[Any, Any]) -> None:
        """Add samples [N, *shape]."""
        if not values.size:
            return
        per_group = math.prod(self.shape) // max(1, len(self.count))
        rows = max(1, _BLOCK // max(1, math.prod(self.shape)))
        for start in range(0, len(values), rows):
            block = values[start : start + rows]
            grouped = block.reshape(len(block), len(self.count), per_group)
            self._merge(*(_byte_figures(grouped) if block.dtype == np.uint8 else _figures(grouped)))

    def _merge(self, count: Any, mean: Any, squares: Any, low: Any, high: Any) -> None:
        total = self.count + count
        share = np.divide(count, total, out=np.zeros_like(total), where=total > 0)
        gap = mean - self.mean
        self.squares += squares + gap**2 * self.count * share
        self.mean += gap * share
        self.count = total
        self.min = np.minimum(self.min, low)
        self.max = np.maximum(self.max, high)

    def state(self) -> np.ndarray[Any, Any]:
        """Return the complete state, float64 [5, groups], for `merge` in another process."""
        return np.stack([self.count, self.mean, self.squares, self.min, self.max])

    def merge(self, state: np.ndarray[Any, Any]) -> None:
        """Add the state of other moments of the same shape."""
        self._merge(*state)

    @property
    def std(self) -> np.ndarray[Any, Any]:
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    def summary(self) -> dict[str, Any]:
        figures = {"min": self.min, "max": self.max, "mean": self.mean, "std": self.std}
        single = self.shape == () or len(self.count) == 1
        return {
            name: _plain(value[0]) if single else [_plain(number) for number in value]
            for name, value in figures.items()
        }


def feature_groups(shape: tuple[int, ...]) -> int:
    """Return how many groups a sample of this shape has: its features, its channels, or one."""
    return shape[0] if len(shape) in (1, 3) else 1


def _figures(grouped: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Return count, mean, squared deviations, minimum and maximum per group of [N, groups, m]."""
    groups = grouped.shape[1]
    # Each group contiguous: reductions over short rows take several times as long.
    values = grouped.transpose(1, 0, 2).astype(np.float64, order="C").reshape(groups, -1)
    present = np.isfinite(values)
    if not present.all():
        rows = [_of_row(row[there]) for row, there in zip(values, present, strict=True)]
        return tuple(np.array(figure) for figure in zip(*rows, strict=True))
    count = np.full(groups, float(values.shape[1]))
    mean, low, high = values.mean(1), values.min(1), values.max(1)
    values -= mean[:, None]
    return count, mean, np.einsum("gn,gn->g", values, values), low, high


def _of_row(row: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """Return the figures of `_figures` for the finite values of one group."""
    if not row.size:
        return 0.0, 0.0, 0.0, math.inf, -math.inf
    mean = row.mean()
    low, high = row.min(), row.max()
    row -= mean
    # einsum, because a dot product would start BLAS threads.
    return float(row.size), mean, np.einsum("n,n->", row, row), low, high


def _byte_figures(grouped: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Return the figures of `_figures` for bytes, summed in integers: exact and faster."""
    count = np.full(grouped.shape[1], float(grouped.shape[0] * grouped.shape[2]))
    total = grouped.sum(axis=(0, 2), dtype=np.uint64).astype(np.float64)
    squared = grouped.astype(np.uint16)
    squared *= squared
    squares = squared.sum(axis=(0, 2), dtype=np.uint64) - total**2 / count
    return count, total / count, squares, grouped.min(axis=(0, 2)), grouped.max(axis=(0, 2))


def _plain(number: Any) -> float | int | None:
    """Return a JSON number: an integer if it is one, null if it is not finite."""
    value = float(number)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
