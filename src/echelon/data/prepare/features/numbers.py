"""Standardise, min_max, bins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

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

if TYPE_CHECKING:
    from scipy.sparse import csr_array


# --- numbers ---
# Columns of any origin as one matrix of numbers, where a missing value is NaN.

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


# --- scale ---
# What scaling numbers needs to know: their moments, gathered block by block.


class Scaled(NumberFeature):
    """Learns count, mean, deviation, minimum and maximum of each column of train.

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


def not_zero(scale: NDArray[np.float64], learnt: Learnt) -> NDArray[np.float64]:
    """1 for a column that never changes, so that it can be divided by."""
    return np.where(learnt["max"] > learnt["min"], scale, 1.0)


# --- standardise ---
# Numbers of mean 0 and deviation 1.


class Standardise(Scaled):
    """(x − mean) ÷ deviation, by figures of train; float32. As scikit-learn's StandardScaler."""

    missing: Literal["mean", "keep"] = "mean"
    """Missing values become 0, which is the mean; or stay missing (NaN)."""

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        values = self.matrix(block)
        if self.missing == "mean":
            values = filled(values, learnt["mean"])
        values -= learnt["mean"]
        values /= not_zero(learnt["std"], learnt)
        return self.made(block, values.astype(np.float32, order="C"))


# --- min_max ---
# Numbers brought into a range.


class MinMax(Scaled):
    """The least value of train to the low end, the greatest to the high end; float32.

    As scikit-learn's MinMaxScaler.
    """

    low: float = 0.0
    high: float = 1.0
    clip: bool = False
    """Values beyond those of train become the ends; else they lie outside of the range."""
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


# --- bins ---
# Numbers as the numbers of bins that hold equally many records each.

_FEW = 32


class Bins(NumberFeature):
    """The bin of each value, int64 from 0, between quantiles of train.

    Bounds are exact up to 4,096 different values of a column in a block, and else by a summary
    with a known error (see `sketch`). Bins that would be empty are left out, as in
    scikit-learn's KBinsDiscretizer. What lies below or above all of train is in the first or last
    bin; a missing value is in one of its own, `bins`.
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
    """The values at which the second and later bins begin."""
    edges = np.unique(quantiles(summary, np.linspace(0, 1, bins + 1)))
    return edges[1:-1]


def binned(
    values: Matrix, bounds: Iterable[NDArray[np.float64]], missing: int
) -> NDArray[np.int64]:
    """The number of each value's bin; `missing` for one that is not there."""
    out = np.empty(values.shape, np.int64)
    for at, bound in enumerate(bounds):
        column = values[:, at]
        out[:, at] = _places(column, bound)
        gaps = np.isnan(column)
        if gaps.any():
            out[gaps, at] = missing
    return out


def _places(column: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[Any]:
    """How many bounds each value reaches."""
    if len(bounds) > _FEW:
        return np.searchsorted(bounds, column, side="right")
    # Of few bounds, to compare with all is several times as fast as to search.
    found = np.zeros(len(column), np.uint8)
    for bound in bounds:
        found += column >= bound
    return found


# --- rows ---
# Rows of a matrix, dense or sparse, whatever columns they come from.

Rows: TypeAlias = "Matrix | csr_array"


def rows(kind: str, block: Columns, names: list[str]) -> Rows:
    """float64; a single sparse column stays so, and of others a missing value is 0."""
    first = block[names[0]]
    if len(names) == 1 and isinstance(first, Sparse):
        return compressed(first)
    dense = matrix(kind, block, names)
    dense[np.isnan(dense)] = 0
    return dense


def compressed(sparse: Sparse) -> csr_array:
    """The same rows as scipy has them."""
    from scipy.sparse import csr_array

    shape = (len(sparse.offsets) - 1, sparse.width)
    values = sparse.values.astype(np.float64)
    return csr_array((values, sparse.indices, sparse.offsets), shape)


def upright(components: NDArray[np.float64]) -> NDArray[np.float64]:
    """Directions [K, D] whose largest entry is positive: their sign is otherwise a matter of luck.

    As scikit-learn has them.
    """
    largest = np.abs(components).argmax(1)
    signs: Any = np.sign(components[np.arange(len(components)), largest])
    out: NDArray[np.float64] = components * np.where(signs == 0, 1, signs)[:, None]
    return out


# --- figures ---
# Count, mean and squared deviations of groups of records, merged without loss of digits.

Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of each group and each of K numbers: `count` [G], `mean` and `squares` [G, K]."""

    count: NDArray[np.float64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def none(cls, *shape: int) -> Figures:
        """Of groups that have no record yet: shape is (…, groups, K)."""
        return cls(np.zeros(shape[:-1]), np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, groups: Whole, size: int, values: NDArray[np.float64]) -> Figures:
        """Of records [N, K] in `size` groups."""
        count = np.bincount(groups, minlength=size).astype(np.float64)
        some = np.maximum(count, 1)[:, None]
        mean = _sums(groups, size, values) / some
        return cls(count, mean, _sums(groups, size, (values - mean[groups]) ** 2))

    def merged(self, other: Figures) -> Figures:
        """Of the records of both (Chan, Golub and LeVeque)."""
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)[..., None]
        gap = other.mean - self.mean
        squares = self.squares + other.squares + gap**2 * self.count[..., None] * share
        return Figures(count, self.mean + gap * share, squares)

    def at(self, groups: Any) -> Figures:
        """Of some groups."""
        return Figures(self.count[groups], self.mean[groups], self.squares[groups])

    def put(self, groups: Whole, figures: Figures) -> None:
        """Replace those of some groups."""
        self.count[groups] = figures.count
        self.mean[groups] = figures.mean
        self.squares[groups] = figures.squares


def _sums(groups: Whole, size: int, values: NDArray[np.float64]) -> NDArray[np.float64]:
    sums = [np.bincount(groups, column, size) for column in values.T]
    return np.stack(sums, 1) if sums else np.zeros((size, 0))
