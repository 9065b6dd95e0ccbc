"""Quantiles of a stream: a summary of each block, merged in block order, with a known error.

A summary is a sorted list of values, each with the number of records it stands for. Up to SIZE
different values it is exact. With more, it keeps the values at SIZE equally spaced ranks: one such
step puts every rank off by at most 1 / (2 · SIZE) of its records. A block's summary is one step;
SPAN summaries are then put together in one more step, SPAN of these in another, and so on:

    rank error ≤ (1 + ⌈log_SPAN blocks⌉) / (2 · SIZE) of all records

which is 0.037 % for up to 1,024 blocks and 0.049 % for up to 32,768. It takes 2 MB per column and
level, however long the stream is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SIZE = 4096
SPAN = 32


class Summary(NamedTuple):
    """Sorted different values, and how many records each stands for."""

    values: NDArray[np.float64]
    counts: NDArray[np.int64]


def summarise(values: NDArray[np.float64]) -> Summary:
    """A block's summary; missing values are left out."""
    found, counts = np.unique(values[~np.isnan(values)], return_counts=True)
    return _shortened(Summary(found, counts))


def merge(summaries: Sequence[Summary]) -> Summary:
    """One summary of all, in one step."""
    values = np.concatenate([summary.values for summary in summaries])
    counts = np.concatenate([summary.counts for summary in summaries])
    return _shortened(_together(values, counts))


class Sketch:
    """Takes in one block's summary after the other."""

    def __init__(self) -> None:
        self._levels: list[list[Summary]] = [[]]

    def add(self, summary: Summary) -> None:
        level = 0
        self._levels[0].append(summary)
        while len(self._levels[level]) == SPAN:
            whole = merge(self._levels[level])
            self._levels[level] = []
            level += 1
            if level == len(self._levels):
                self._levels.append([])
            self._levels[level].append(whole)

    def summary(self) -> Summary:
        """All there is, without a further step."""
        rest = [summary for level in self._levels for summary in level]
        if not rest:
            return Summary(np.empty(0), np.empty(0, np.int64))
        values = np.concatenate([summary.values for summary in rest])
        return _together(values, np.concatenate([summary.counts for summary in rest]))


def quantiles(summary: Summary, at: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least value that this part of the records does not exceed.

    Where the part ends between two records, it is the middle of both: numpy's method
    "averaged_inverted_cdf".
    """
    ranks = summary.counts.cumsum()
    wanted = at * ranks[-1]
    # A part such as 0.3 · 10 must not fall beside its rank by a rounding error.
    near = np.rint(wanted)
    wanted = np.where(np.abs(wanted - near) <= 1e-12 * ranks[-1], near, wanted)
    low = np.minimum(np.searchsorted(ranks, wanted, "left"), len(ranks) - 1)
    high = np.minimum(np.searchsorted(ranks, wanted, "right"), len(ranks) - 1)
    middle: NDArray[np.float64] = summary.values[low] / 2 + summary.values[high] / 2
    return np.where(low == high, summary.values[low], middle)


def partial(columns: Iterable[NDArray[np.float64]]) -> dict[str, Any]:
    """The summaries of several columns as plain arrays, to be sent."""
    summaries = [summarise(column) for column in columns]
    return {
        "values": np.concatenate([np.empty(0), *(summary.values for summary in summaries)]),
        "counts": np.concatenate(
            [np.empty(0, np.int64), *(summary.counts for summary in summaries)]
        ),
        "sizes": np.array([len(summary.values) for summary in summaries], np.int64),
    }


class Sketches:
    """A sketch of each column, from what `partial` found in one block after the other."""

    def __init__(self) -> None:
        self._columns: list[Sketch] = []

    def add(self, found: dict[str, Any]) -> None:
        sizes = found["sizes"]
        self._columns = self._columns or [Sketch() for _ in sizes]
        pieces = zip(apart(found["values"], sizes), apart(found["counts"], sizes), strict=True)
        for sketch, (values, counts) in zip(self._columns, pieces, strict=True):
            sketch.add(Summary(values, counts))

    def summaries(self) -> list[Summary]:
        return [sketch.summary() for sketch in self._columns]


def sketches(partials: Iterable[dict[str, Any]]) -> list[Summary]:
    """A summary of each column from all blocks."""
    whole = Sketches()
    for found in partials:
        whole.add(found)
    return whole.summaries()


def apart(values: NDArray[Any], sizes: NDArray[np.int64]) -> list[NDArray[Any]]:
    """The parts of these sizes that values are made of."""
    return np.split(values, sizes.cumsum())[:-1]


def _together(values: NDArray[np.float64], counts: NDArray[np.int64]) -> Summary:
    found, inverse = np.unique(values, return_inverse=True)
    total = np.zeros(len(found), np.int64)
    np.add.at(total, inverse, counts)
    return Summary(found, total)


def _shortened(summary: Summary) -> Summary:
    """The first and last record, and SIZE values between them for about as many records each."""
    if len(summary.values) <= SIZE:
        return summary
    ranks = summary.counts.cumsum()
    last = int(ranks[-1]) - 1
    edges = np.concatenate([[0], 1 + np.arange(SIZE + 1) * (last - 1) // SIZE, [last + 1]])
    # A part is stood for by the record in its middle.
    middles = (edges[:-1] + edges[1:] - 1) // 2
    values = summary.values[np.searchsorted(ranks, middles, "right")]
    counts = np.diff(edges)
    return _together(values[counts > 0], counts[counts > 0])
