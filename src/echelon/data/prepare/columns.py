"""The columns of a block: raw ones as Arrow arrays, made ones as plain numpy memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]


class Ragged(NamedTuple):
    """Rows of any length: row i is `values[offsets[i]:offsets[i + 1]]`; offsets begin at 0."""

    values: Array
    offsets: NDArray[np.int64]


class Sparse(NamedTuple):
    """Rows of a CSR matrix, as `core.types.Sparse` has them, but in numpy: no torch in workers."""

    indices: Array
    values: Array
    offsets: NDArray[np.int64]
    width: int


Values: TypeAlias = "pa.Array | Array | Ragged | Sparse"
"""A raw column (nulls are missing values), numbers of one fixed shape, or rows of any length."""
Columns: TypeAlias = Mapping[str, Values]
"""Column name → values of all rows of a block."""


SPLIT, RECORD = "@split", "@record"
"""What only a preparation knows of its rows, for features that read these names: the number of
each one's split (int8) and its own (int64). They are absent when new records are encoded."""

WEIGHT = "weight"
"""The column that `balance` writes, unless it resamples."""


def rows(values: Values) -> int:
    """How many rows a column has."""
    return len(values.offsets) - 1 if isinstance(values, Ragged | Sparse) else len(values)


def take(values: Values, chosen: NDArray[np.int64]) -> Values:
    """These rows, in this order."""
    if isinstance(values, Ragged):
        pick, offsets = _picking(values.offsets, chosen)
        return Ragged(pick(values.values), offsets)
    if isinstance(values, Sparse):
        pick, offsets = _picking(values.offsets, chosen)
        return Sparse(pick(values.indices), pick(values.values), offsets, values.width)
    if isinstance(values, np.ndarray):
        return values.take(chosen, 0)  # rows of several numbers: five times as quick as by [chosen]
    return values.take(pa.array(chosen))


def _picking(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[Callable[[Array], Array], NDArray[np.int64]]:
    """How to get at the entries of these rows, and the offsets of the rows that they make."""
    if each := _each(offsets):  # then they are the rows of a matrix, which are found quickly
        made = np.arange(0, each * len(chosen) + 1, each)
        return lambda column: column.reshape(-1, each).take(chosen, 0).reshape(-1), made
    at, made = entries(offsets, chosen)
    return lambda column: column[at], made


def _each(offsets: NDArray[np.int64]) -> int:
    """How many entries every row has, if all have as many; else 0."""
    count = len(offsets) - 1
    each = int(offsets[1]) if count else 0
    even = each * count == int(offsets[-1]) and bool((np.diff(offsets) == each).all())
    return each if even else 0


def take_all(block: Columns, chosen: NDArray[np.int64]) -> dict[str, Values]:
    """These rows of every column."""
    return {name: take(values, chosen) for name, values in block.items()}


def entries(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the entries of these rows are, and the offsets of the rows that they make."""
    starts = offsets[chosen]
    lengths = offsets[chosen + 1] - starts
    made = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(lengths, out=made[1:])
    at = np.repeat(starts - made[:-1], lengths)
    at += np.arange(made[-1])
    return at, made
