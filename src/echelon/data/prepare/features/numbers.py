"""Features of numbers: standardise, min_max, bins; and columns of any origin as one matrix.

All read their source columns side by side as float64 [N, D] (`matrix`), where NaN is missing, and
make one column of the same width. What they learn is merged block by block: moments for scaling,
a quantile summary (quantiles.py) for bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError
from echelon.data.prepare.features.quantiles import Summary, apart, partial, quantiles, sketches
from echelon.data.prepare.steps import Columns, Feature, Ragged, Sparse, Values
from echelon.data.prepare.workdir import Learnt
from echelon.data.shards.statistics import Moments

Matrix: TypeAlias = NDArray[np.float64]


class NumberFeature(Feature):
    """A feature of columns of numbers, side by side in the column it makes."""

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
        """Return the source columns as float64 [N, D]; missing and infinite values are NaN."""
        return matrix(self.kind, block, self.sources)

    def made(self, block: Columns, values: NDArray[Any]) -> dict[str, Values]:
        """Return the new column: [N] if made of one column of single numbers, else [N, D]."""
        single = len(self.sources) == 1 and _is_single(block[self.sources[0]])
        return {self.name: values.reshape(-1) if single else values}


class Scaled(NumberFeature):
    """A feature that learns count, mean, deviation, minimum and maximum of each column of train.

    Blocks are merged as (count, mean, sum of squared deviations), in their order.
    """

    passes: ClassVar[int] = 1

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        values = self.matrix(block)
        moments = Moments((values.shape[1],))
        moments.add(values)
        return {"moments": moments.state()}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        moments: Moments | None = None
        for part in partials:
            moments = moments or Moments(part["moments"].shape[1:])
            moments.merge(part["moments"])
        if moments is None or not moments.count.all():
            raise DataError(
                f"feature {self.kind}: {self._empty(moments)} has no number in any record of train"
            )
        return {
            "count": moments.count.astype(np.int64),
            "mean": moments.mean,
            "std": moments.std,
            "min": moments.min,
            "max": moments.max,
        }

    def _empty(self, moments: Moments | None) -> str:
        whole = moments is None or len(moments.count) != len(self.sources)
        name = "" if whole else self.sources[int(moments.count.argmin())]  # type: ignore[union-attr]
        return f"column {name!r}" if name else f"one of {', '.join(self.sources)}"


class Standardise(Scaled):
    """(x − mean) ÷ deviation of train, float32; like scikit-learn's StandardScaler."""

    missing: Literal["mean", "keep"] = "mean"
    """Missing values become 0, which is the mean; or stay missing (NaN)."""

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        values = self.matrix(block)
        if self.missing == "mean":
            values = filled(values, learnt["mean"])
        values -= learnt["mean"]
        values /= not_zero(learnt["std"], learnt)
        return self.made(block, values.astype(np.float32, order="C"))


class MinMax(Scaled):
    """Minimum and maximum of train mapped to `low` and `high`, float32.

    Like scikit-learn's MinMaxScaler.
    """

    low: float = 0.0
    high: float = 1.0
    clip: bool = False
    """Clip values beyond those of train to the range; otherwise they lie outside of it."""
    missing: Literal["mean", "keep"] = "mean"
    """Missing values become the mean of train, scaled; or stay missing (NaN)."""

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.low >= self.high:
            raise SettingError(f"low = {self.low:g} must be below high = {self.high:g}", "low")
        return self

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        values = self.matrix(block)
        if self.missing == "mean":
            values = filled(values, learnt["mean"])
        values -= learnt["min"]
        values *= (self.high - self.low) / not_zero(learnt["max"] - learnt["min"], learnt)
        values += self.low
        if self.clip:
            np.clip(values, self.low, self.high, out=values)
        return self.made(block, values.astype(np.float32, order="C"))


def not_zero(scale: NDArray[np.float64], learnt: Learnt) -> NDArray[np.float64]:
    """Return `scale` with 1 for constant columns, so that one can divide by it."""
    return np.where(learnt["max"] > learnt["min"], scale, 1.0)


class Bins(NumberFeature):
    """The bin of each value, int64 from 0; bins hold about equally many records of train.

    Bounds are quantiles of train: exact up to 4,096 different values of a column in a block, beyond
    that from a summary with a known error (quantiles.py). Bins that would be empty are left out, as
    in scikit-learn's KBinsDiscretizer. Values below or above all of train are in the first or last
    bin; missing values are in a bin of their own, number `bins`.
    """

    bins: Annotated[int, Field(ge=2, le=65_536)] = 10

    passes: ClassVar[int] = 1

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        return partial(self.matrix(block).T)

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        summaries = sketches(partials)
        if not summaries or not all(len(summary.values) for summary in summaries):
            names = ", ".join(self.sources)
            raise DataError(f"feature {self.kind}: {names}: no number in any record of train")
        bounds = [bin_bounds(summary, self.bins) for summary in summaries]
        return {
            "bounds": np.concatenate(bounds),
            "sizes": np.array([len(bound) for bound in bounds], np.int64),
        }

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        bounds = apart(learnt["bounds"], learnt["sizes"])
        return self.made(block, binned(self.matrix(block), bounds, self.bins))

    def different(self, learnt: Learnt) -> int:
        return self.bins + 1


def bin_bounds(summary: Summary, bins: int) -> NDArray[np.float64]:
    """Return the values at which the second and later bins begin."""
    edges = np.unique(quantiles(summary, np.linspace(0, 1, bins + 1)))
    return edges[1:-1]


def binned(
    values: Matrix, bounds: Iterable[NDArray[np.float64]], missing: int
) -> NDArray[np.int64]:
    """Return the bin of each value; `missing` for NaN."""
    out = np.empty(values.shape, np.int64)
    for at, bound in enumerate(bounds):
        column = values[:, at]
        out[:, at] = _places(column, bound)
        gaps = np.isnan(column)
        if gaps.any():
            out[gaps, at] = missing
    return out


def _places(column: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[Any]:
    """Return how many bounds each value reaches."""
    if len(bounds) > _FEW:
        return np.searchsorted(bounds, column, side="right")
    # With few bounds, comparing with all of them is several times as fast as a binary search.
    found = np.zeros(len(column), np.uint8)
    for bound in bounds:
        found += column >= bound
    return found


_FEW = 32


# Columns of any origin as one matrix of numbers


def matrix(kind: str, block: Columns, names: Sequence[str]) -> Matrix:
    """Return columns side by side as float64 [N, D]; missing and infinite values are NaN."""
    parts = [_numbers(kind, name, block[name]) for name in names]
    # Always a copy, because callers change it in place. Columns are contiguous, because most work
    # is done column by column.
    out: Matrix = np.empty((len(parts[0]), sum(part.shape[1] for part in parts)), order="F")
    ends = np.cumsum([part.shape[1] for part in parts]).tolist()
    for part, start, stop in zip(parts, [0, *ends], ends, strict=False):
        here = out[:, start:stop]
        here[:] = part
        if part.dtype.kind == "f":
            np.copyto(here, np.nan, where=np.isinf(here))
    return out


def filled(values: Matrix, stand_in: NDArray[np.float64]) -> Matrix:
    """Replace the missing values of each column by a number, in place; return `values`."""
    for column, number in zip(values.T, stand_in, strict=True):
        np.copyto(column, number, where=np.isnan(column))
    return values


def named(feature: Feature) -> None:
    """Raise DataError if a feature of several columns has no name for the column it makes."""
    if not feature.to and len(feature.sources) != 1:
        raise DataError(
            f"feature {feature.kind}: made of {', '.join(feature.sources) or 'nothing'}: "
            f"say with `to` what it is to be called"
        )


def _numbers(kind: str, name: str, values: Values) -> NDArray[Any]:
    if isinstance(values, Sparse | Ragged):
        form = "sparse" if isinstance(values, Sparse) else "of rows of any length"
        raise DataError(f"feature {kind}: column {name!r} is {form}: it must be {_CHOICES}")
    if not isinstance(values, np.ndarray):
        values = _from_arrow(kind, name, values)
    if values.dtype.kind not in "biuf":
        raise DataError(f"feature {kind}: column {name!r} is of {values.dtype}, not numbers")
    return values.reshape(len(values), -1) if len(values) else values.reshape(0, _width(values))


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
    # Unsafe casts are allowed: whole numbers beyond 2⁵³ are rounded.
    return np.asarray(pc.cast(values, pa.float64(), safe=False).fill_null(np.nan).to_numpy())


def _with_gaps(known: NDArray[Any], values: Any) -> Matrix:
    """Return the rows of `known` in their places, and NaN where a vector is missing."""
    out = np.full((len(values), _width(known)), np.nan)
    out[values.is_valid().to_numpy(zero_copy_only=False)] = known.reshape(len(known), out.shape[1])
    return out


def _since(values: Any) -> Any:
    """Return times as whole numbers of their own unit: days, seconds, milliseconds, …"""
    narrow = values.type.bit_width == 32
    return values.cast(pa.int32() if narrow else pa.int64())


def _width(values: NDArray[Any]) -> int:
    return int(np.prod(values.shape[1:], dtype=np.int64))


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


_CHOICES = "numbers, truth values, times, or vectors of one length"


def _is_vector(form: pa.DataType) -> bool:
    return isinstance(form, pa.FixedShapeTensorType) or pa.types.is_fixed_size_list(form)


def _is_single(values: Values) -> bool:
    if isinstance(values, np.ndarray):
        return values.ndim == 1
    return not _is_vector(values.type)  # type: ignore[union-attr]
