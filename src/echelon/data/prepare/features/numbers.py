"""Columns of any origin as one matrix of numbers, where a missing value is NaN."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare.columns import Columns, Ragged, Sparse, Values
from echelon.data.prepare.feature import Feature

Matrix: TypeAlias = NDArray[np.float64]
_CHOICES = "numbers, truth values, times, or vectors of one length"


class NumberFeature(Feature):
    """A feature made of columns of numbers, which stand side by side in the one it makes."""

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        named(self)
        for name in self.sources:
            if not _fits(names[name]):
                raise DataError(
                    f"feature {self.kind}: column {name!r} is of type {names[name]}: "
                    f"it must be {_CHOICES}"
                )

    def matrix(self, block: Columns) -> Matrix:
        """float64 [N, D]; NaN is missing, and so is what is infinite."""
        return matrix(self.kind, block, self.sources)

    def made(self, block: Columns, values: NDArray[Any]) -> dict[str, Values]:
        """The new column: [N] if it is made of single numbers of one column, else [N, D]."""
        single = len(self.sources) == 1 and _is_single(block[self.sources[0]])
        return {self.name: values.reshape(-1) if single else values}


def named(feature: Feature) -> None:
    """Refuse a feature of several columns that does not say what it is to be called."""
    if not feature.to and len(feature.sources) != 1:
        raise DataError(
            f"feature {feature.kind}: made of {', '.join(feature.sources) or 'nothing'}: "
            f"say with `to` what it is to be called"
        )


def matrix(kind: str, block: Columns, names: Sequence[str]) -> Matrix:
    """These columns side by side."""
    parts = [_numbers(kind, name, block[name]) for name in names]
    # Always a copy, for work in place; a column in one piece, because most of it is by column.
    out: Matrix = np.empty((len(parts[0]), sum(part.shape[1] for part in parts)), order="F")
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    for part, start, stop in zip(parts, [0, *ends], ends, strict=False):
        here = out[:, start:stop]
        here[:] = part
        if part.dtype.kind == "f":
            np.copyto(here, np.nan, where=np.isinf(here))
    return out


def filled(values: Matrix, stand_in: NDArray[np.float64]) -> Matrix:
    """The same with a number for each column's missing values; changes `values`."""
    for column, number in zip(values.T, stand_in, strict=True):
        np.copyto(column, number, where=np.isnan(column))
    return values


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums that BLAS adds up in one order, however many threads a process has."""
    with _threads().limit(limits=1, user_api="blas"):
        yield


@cache
def _threads() -> Any:
    """To look for BLAS among all that is loaded takes milliseconds: once is enough for numpy's."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def _numbers(kind: str, name: str, values: Values) -> NDArray[Any]:
    if isinstance(values, Sparse | Ragged):
        form = "sparse" if isinstance(values, Sparse) else "of rows of any length"
        raise DataError(f"feature {kind}: column {name!r} is {form}: it must be {_CHOICES}")
    if not isinstance(values, np.ndarray):
        values = _from_arrow(kind, name, values)
    if values.dtype.kind not in "biuf":
        raise DataError(f"feature {kind}: column {name!r} is of {values.dtype}, not numbers")
    return values.reshape(len(values), -1) if len(values) else values.reshape(0, _width(values))


def _width(values: NDArray[Any]) -> int:
    return int(np.prod(values.shape[1:], dtype=np.int64))


def _from_arrow(kind: str, name: str, values: Any) -> NDArray[Any]:
    form = values.type
    if _is_vector(form) and values.null_count:
        return _with_gaps(_from_arrow(kind, name, values.drop_null()), values)
    if isinstance(form, pa.FixedShapeTensorType):
        return np.asarray(values.to_numpy_ndarray())
    if pa.types.is_fixed_size_list(form):
        flat = _from_arrow(kind, name, values.flatten())
        return flat.reshape(len(values), form.list_size * _width(flat))
    if not _fits(form):
        raise DataError(f"feature {kind}: column {name!r} is of type {form}: not numbers")
    if pa.types.is_null(form):
        return np.full(len(values), np.nan)
    if pa.types.is_temporal(form):
        values = _since(values)
    if pa.types.is_integer(values.type) and not values.null_count:
        return np.asarray(values.to_numpy())
    # Not safe: whole numbers beyond 2⁵³ are rounded.
    return np.asarray(pc.cast(values, pa.float64(), safe=False).fill_null(np.nan).to_numpy())


def _with_gaps(known: NDArray[Any], values: Any) -> Matrix:
    """All rows: those of `known`, and NaN where a vector is missing."""
    out = np.full((len(values), _width(known)), np.nan)
    out[values.is_valid().to_numpy(zero_copy_only=False)] = known.reshape(len(known), out.shape[1])
    return out


def _since(values: Any) -> Any:
    """Times as whole numbers of their own unit: days, seconds, milliseconds, …"""
    narrow = values.type.bit_width == 32
    return values.cast(pa.int32() if narrow else pa.int64())


def _is_vector(form: pa.DataType) -> bool:
    return isinstance(form, pa.FixedShapeTensorType) or pa.types.is_fixed_size_list(form)


def _fits(form: pa.DataType) -> bool:
    if _is_vector(form):
        return _fits(form.value_type)
    tests = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_boolean,
        pa.types.is_decimal,
        pa.types.is_null,
    )
    times = pa.types.is_temporal(form) and not pa.types.is_interval(form)
    return times or any(test(form) for test in tests)


def _is_single(values: Values) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim == 1
    return not _is_vector(values.type)  # type: ignore[union-attr]
