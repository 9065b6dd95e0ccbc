"""Non-negative matrix factorisation of more rows than fit into memory.

    counts X on disk, a batch at a time        W: what topics a text has, on disk
    X ≈ W H                                    H: what terms a topic has, in memory

One pass brings W nearer for the H there is, batch by batch, and adds up WᵀX and WᵀW, which is all
that H needs. So passes are those of scikit-learn's coordinate descent on the whole of X, whatever
the size of a batch; as many are done as are needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.features.numbers import one_thread

Floats = NDArray[np.float64]
_BATCH = 4096
_PASSES = range(50, 201)
_TEXTS = 1_000_000
"""Texts that are gone through in all, within these limits: many texts settle in fewer passes."""
_ENOUGH = 1e-4
"""The part of what the first pass changed at which there is no more to be done."""


class Spool:
    """Rows of counts in files: `add` in order, then `batches` as often as wanted."""

    def __init__(self, folder: Path, width: int) -> None:
        self._width = width
        self._folder = folder
        self._offsets = array("q", [0])
        self.total = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._files = [stack.enter_context(self._path(name).open("wb")) for name in _PARTS]
            self._open = stack.pop_all()

    @property
    def rows(self) -> int:
        return len(self._offsets) - 1

    def add(self, rows: Any) -> None:
        """A csr matrix."""
        self._files[0].write(rows.indices.astype(np.int32).tobytes())
        self._files[1].write(rows.data.astype(np.float32).tobytes())
        ends = rows.indptr[1:].astype(np.int64) - rows.indptr[0] + self._offsets[-1]
        self._offsets.frombytes(ends.tobytes())
        self.total += float(rows.data.sum(dtype=np.float64))

    def close(self) -> None:
        self._open.close()

    def batches(self) -> Iterator[tuple[slice, Any]]:
        """Which rows, and these."""
        from scipy.sparse import csr_matrix

        for low in range(0, self.rows, _BATCH):
            bounds = np.array(self._offsets[low : low + _BATCH + 1])
            start, count = int(bounds[0]), int(bounds[-1] - bounds[0])
            indices, data = (
                np.fromfile(self._path(name), kind, count, offset=start * kind.itemsize)
                for name, kind in _PARTS.items()
            )
            rows = len(bounds) - 1
            parts = data.astype(np.float64), indices, bounds - start
            yield slice(low, low + rows), csr_matrix(parts, shape=(rows, self._width))

    def _path(self, name: str) -> Path:
        return self._folder / name


_PARTS = {"indices": np.dtype(np.int32), "values": np.dtype(np.float32)}


def topics_of(spool: Spool, width: int, topics: int, seed: int, scratch: Path) -> Floats:
    """H [topics, width] of the rows, from a start that the seed says."""
    random = np.random.RandomState(seed)
    scale = np.sqrt(spool.total / (spool.rows * width) / topics)
    h: Floats = np.abs(scale * random.standard_normal((topics, width))).T.copy()
    w = np.memmap(scratch / "texts", np.float64, "w+", shape=(spool.rows, topics))
    for low in range(0, spool.rows, _BATCH):
        part = w[low : low + _BATCH]
        part[:] = np.abs(scale * random.standard_normal(part.shape))
    first = 0.0
    with one_thread():
        for at in range(min(max(_TEXTS // spool.rows, _PASSES[0]), _PASSES[-1])):
            change = _pass(spool, w, h)
            first = first if at else change
            if change <= _ENOUGH * first:
                break
    return h.T


def _pass(spool: Spool, w: Any, h: Floats) -> float:
    """Bring W nearer, then H, which is [width, topics] here; how much there was to change."""
    change = 0.0
    seen, own = np.zeros_like(h), np.zeros((h.shape[1], h.shape[1]))
    terms = h.T @ h
    for rows, counts in spool.batches():
        mine = np.array(w[rows])
        change += _nearer(mine, terms, counts @ h)
        seen += counts.T @ mine
        own += mine.T @ mine
        w[rows] = mine
    return change + _nearer(h, own, seen)


def _nearer(rows: Floats, square: Floats, seen: Floats) -> float:
    """Each topic's column in turn to where it is best while the others stay; none below zero."""
    change = 0.0
    for topic in range(rows.shape[1]):
        slope = rows @ square[:, topic] - seen[:, topic]
        column = rows[:, topic]
        change += float(np.abs(np.where(column == 0, np.minimum(slope, 0), slope)).sum())
        if square[topic, topic]:
            rows[:, topic] = np.maximum(column - slope / square[topic, topic], 0)
    return change
