"""Summaries of a stream of values in constant memory: distinct counts, samples, statistics.

`Distinct` counts values one by one while they are few. Of many values it keeps only the k smallest
hashes: if n hashes are spread evenly, the k-th smallest is at k/n of their range, which gives n
with an error of about 1/√k (bottom-k, Bar-Yossef et al.).

`Sample` keeps an even sample. Each record has a key, a pure function of its number (`record_keys`),
and the records with the smallest keys are the sample. All columns share the keys, so a second pass
over the same data gives the same sample.

`Numbers` has exact extremes, mean and standard deviation; quantiles and histogram are those of a
sample.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.hashing import Words, key, words
from echelon.data.hashing import hashed
from echelon.data.shards.statistics import Moments

COUNTED = 4096
"""Distinct values that are counted one by one."""
KEPT = 16_384
"""Hashes that are kept beyond that; the standard error of estimates is 0.8 %."""
_PROBE = 4 * COUNTED
"""Values of a batch that are counted first, which is enough to see that there are many."""
_HELD = 16 << 20
"""Bytes of values that are counted one by one; documents soon exceed it and are hashed instead."""


class Distinct:
    """The distinct values of one column, in constant memory."""

    def __init__(self, kind: Any) -> None:
        self.counts: Counter[Any] | None = Counter()
        """How often each value occurs; None once there are too many values."""
        self.kind = kind
        self._smallest = Smallest(KEPT)

    def add(self, column: Any) -> None:
        """Add values without nulls."""
        if self.counts is not None and len(column) > _PROBE:
            self._count(column.slice(0, _PROBE))
            column = column.slice(_PROBE)
        if self.counts is not None:
            self._count(column)
        else:
            self._smallest.add(hashed(column))

    def count(self) -> Count:
        if self.counts is not None:
            return Count(len(self.counts), True)
        return self._smallest.count()

    def _count(self, column: Any) -> None:
        assert self.counts is not None
        found = pc.value_counts(column)
        values, numbers = found.field("values"), found.field("counts")
        if len(values) <= COUNTED:
            pairs = zip(values.to_pylist(), numbers.to_pylist(), strict=True)
            self.counts.update(dict(pairs))
        each = values.nbytes / max(1, len(values))
        if max(len(values), len(self.counts)) > COUNTED or each * len(self.counts) > _HELD:
            self._smallest.add(hashed(values))
            self._smallest.add(hashed(pa.array(list(self.counts), self.kind)))
            self.counts = None


class Count(NamedTuple):
    """The number of distinct values, exact or estimated."""

    value: int
    exact: bool


class Smallest:
    """The `size` smallest distinct words that were added."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: Words = np.empty(0, np.uint64)
        self._bound: np.uint64 | None = None

    def add(self, found: Words) -> None:
        if self._bound is not None:
            found = found[found < self._bound]
        if not len(found):
            return
        both = np.sort(np.concatenate([self._kept, found]))
        new = np.ones(len(both), bool)
        np.not_equal(both[1:], both[:-1], out=new[1:])
        self._kept = both[new][: self._size].copy()
        if len(self._kept) == self._size:
            self._bound = self._kept[-1]

    def count(self) -> Count:
        if len(self._kept) < self._size:
            return Count(len(self._kept), True)
        assert self._bound is not None
        share = (float(self._bound) + 1) / 2.0**64
        return Count(round((self._size - 1) / share), False)


_KEY = key(0x5A4D)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class Sample:
    """An even sample of at most `size` values of a stream."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: list[Words] = []
        self._values: list[Any] = []
        self._held = 0
        self._bound = _ALL

    def chosen(self, keys: Words) -> Any:
        """Return the indices of the records that may still belong to the sample."""
        rows = np.flatnonzero(keys < self._bound)
        if len(rows) > self._size:
            rows = np.sort(rows[np.argpartition(keys[rows], self._size)[: self._size]])
        return rows

    def add(self, keys: Words, values: Any) -> None:
        """Add values [N, …] with their keys: the chosen records, or a part of them."""
        self._keys.append(keys)
        self._values.append(values)
        self._held += len(keys)
        if self._held > 2 * self._size:
            self._thin()

    def values(self) -> Any:
        """Return the sample in the order of the stream; None if nothing was added."""
        if not self._keys:
            return None
        self._thin()
        return self._values[0]

    def _thin(self) -> None:
        keys, values = np.concatenate(self._keys), np.concatenate(self._values)
        if len(keys) > self._size:
            kept = np.sort(np.argpartition(keys, self._size)[: self._size])
            keys, values = keys[kept], values[kept]
            self._bound = keys.max()
        self._keys, self._values, self._held = [keys], [values], len(keys)


def record_keys(first: int, count: int) -> Words:
    """Return the sampling keys of the records first, …, first + count - 1."""
    return words(np.arange(first, first + count, dtype=np.uint64), _KEY)


SAMPLED = 65_536
"""Numbers in a sample; the share of numbers below an estimated quantile is off by 0.2 %."""
QUANTILES = (1, 5, 25, 50, 75, 95, 99)
BARS = 40
_FAR = 3
"""A histogram is cut if the numbers span more than so many times the middle 98 %."""
_ROWS = 1 << 15
"""Numbers processed at a time, so that they stay in the processor's cache."""


class Numbers:
    """The statistics of a stream of numbers, in constant memory."""

    def __init__(self, size: int = SAMPLED) -> None:
        self._moments = Moments(())
        self._sample = Sample(size)
        self._zeros = 0
        self._infinite = 0

    def add(self, values: np.ndarray[Any, Any], keys: Words) -> None:
        """Add numbers other than NaN, with the keys of their records."""
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            finite = np.isfinite(values)
            self._infinite += len(values) - int(finite.sum())
            values, keys = values[finite], keys[finite]
        with np.errstate(over="ignore", invalid="ignore"):  # deviations may be too large to square
            for start in range(0, len(values), _ROWS):
                self._moments.add(values[start : start + _ROWS])
        self._zeros += len(values) - int(np.count_nonzero(values))
        rows = self._sample.chosen(keys)
        self._sample.add(keys[rows], values[rows].astype(np.float64))

    def figures(self) -> Figures | None:
        """Return the summary; None if there was no finite number."""
        sample = self._sample.values()
        if sample is None or not len(sample):
            return None
        moments = self._moments
        low, high = float(moments.min[0]), float(moments.max[0])
        ordered = np.sort(sample)
        return Figures(
            count=int(moments.count[0]),
            min=low,
            mean=float(moments.mean[0]),
            max=high,
            std=float(moments.std[0]),
            zeros=self._zeros,
            infinite=self._infinite,
            sampled=len(sample),
            quantiles=dict(zip(QUANTILES, _at(ordered, QUANTILES), strict=True)),
            histogram=histogram(ordered, low, high),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """A summary of numbers. Quantiles and histogram are those of a sample of `sampled` numbers."""

    count: int
    min: float
    mean: float
    max: float
    std: float
    zeros: int | None
    infinite: int
    sampled: int
    quantiles: dict[int, float]
    histogram: Histogram

    @property
    def exact(self) -> bool:
        """Whether the sample has all numbers."""
        return self.sampled == self.count

    def as_data(self) -> dict[str, Any]:
        data = asdict(self) | {"exact": self.exact}
        data["quantiles"] = {f"p{share}": value for share, value in self.quantiles.items()}
        return data


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of a sample's numbers between edges; `below` and `above` the edges are outliers."""

    edges: list[float]
    counts: list[int]
    below: int = 0
    above: int = 0


def histogram(ordered: np.ndarray[Any, Any], low: float, high: float) -> Histogram:
    """Return bars of equal width over [low, high], or less if outliers would flatten them."""
    first, last = _at(ordered, (1, 99))
    if high - low > _FAR * (last - first) > 0:
        air = (last - first) / 10
        low, high = max(low, first - air), min(high, last + air)
    edges = _edges(ordered, low, high)
    counts, _ = np.histogram(ordered, edges)
    below = int(np.searchsorted(ordered, edges[0], "left"))
    above = len(ordered) - int(np.searchsorted(ordered, edges[-1], "right"))
    return Histogram(edges.tolist(), counts.tolist(), below, above)


def _edges(ordered: np.ndarray[Any, Any], low: float, high: float) -> np.ndarray[Any, Any]:
    """Return the edges of the bars.

    Whole numbers get bars of whole width, so that every bar covers equally many of them.
    """
    whole = max(abs(low), abs(high)) < 2**52 and bool((ordered == np.floor(ordered)).all())
    if whole:
        width = max(1, math.ceil((high - low + 1) / BARS))
        first = math.floor(low)
        bars = math.ceil((math.floor(high) - first + 1) / width)
        return first - 0.5 + width * np.arange(bars + 1, dtype=np.float64)
    if not high - low > abs(high) * 1e-12:
        air = abs(low) * 0.1 or 0.5
        return np.array([low - air, high + air])
    return np.linspace(low, high, BARS + 1)


def _at(ordered: np.ndarray[Any, Any], shares: tuple[int, ...]) -> list[float]:
    """Return quantiles that are values of the sample, without interpolation."""
    found: list[float] = ordered[[(len(ordered) - 1) * share // 100 for share in shares]].tolist()
    return found
