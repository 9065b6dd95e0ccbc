"""Which records repeat an earlier one, out of keys that lie on disk.

Keys of all records are compared one column at a time, and of a large one a part of their range at
a time, so memory does not grow with the number of records.
"""

from __future__ import annotations

from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PART = 2_000_000
"""Records sorted at a time, about."""
_READ = 1 << 20
Numbers = NDArray[np.int64]


class Shelf:
    """One array on disk that grows row by row."""

    def __init__(self, path: Path, dtype: Any, width: int = 1) -> None:
        self._path = path
        self._dtype = np.dtype(dtype)
        self._width = width
        self.rows = 0
        path.write_bytes(b"")

    def add(self, rows: NDArray[Any]) -> None:
        with self._path.open("ab") as file:
            file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self.rows += len(rows)

    def pieces(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Where each piece begins, and its rows."""
        size = self._dtype.itemsize * self._width
        with self._path.open("rb") as file:
            at = 0
            while data := file.read(_READ * size):
                piece = np.frombuffer(data, self._dtype).reshape(-1, self._width)
                yield at, piece
                at += len(piece)

    def taken(self, *chosen: Numbers) -> list[NDArray[Any]]:
        """Some rows. Pages of the file that were read for it do not stay in memory."""
        size = self.rows * self._width * self._dtype.itemsize
        with self._path.open("rb") as file, mmap(file.fileno(), size, access=ACCESS_READ) as whole:
            rows = np.frombuffer(whole, self._dtype).reshape(self.rows, self._width)
            found = [rows[numbers] for numbers in chosen]
            del rows  # a map that is looked at cannot be closed
        return found


def met(shelf: Shelf) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """Records with a key that an earlier one has; the first with that key, and the last before.

    Keys spread evenly: a part of their range is about that part of the records.
    """
    parts = max(1, -(-shelf.rows // PART))
    for part in range(parts):
        numbers, keys = _chosen(shelf, part, parts)
        order = np.lexsort((numbers, *keys.T[::-1]))
        numbers, keys = numbers[order], keys[order]
        same = (keys[1:] == keys[:-1]).all(1)
        if not same.any():
            continue
        heads = np.flatnonzero(np.concatenate([[True], ~same]))
        leaders = np.repeat(numbers[heads], np.diff(np.append(heads, len(numbers))))
        yield numbers[1:][same], leaders[1:][same], numbers[:-1][same]


def _chosen(shelf: Shelf, part: int, parts: int) -> tuple[Numbers, NDArray[Any]]:
    """Records whose key lies in this part of the range."""
    numbers, keys = [], []
    for at, piece in shelf.pieces():
        top = np.iinfo(piece.dtype).bits
        where = ((piece[:, 0] >> (top - 16)).astype(np.int64) * parts) >> 16
        rows = np.flatnonzero(where == part)
        numbers.append(rows + at)
        keys.append(piece[rows])
    if not numbers:
        return np.zeros(0, np.int64), np.zeros((0, 1), np.uint64)
    return np.concatenate(numbers), np.concatenate(keys)


class Links:
    """Which records belong together, and which of them is the first: an array on disk."""

    def __init__(self, count: int, path: Path) -> None:
        self.first: Numbers = np.zeros(0, np.int64)
        if count:
            self.first = np.memmap(path, np.int64, "w+", shape=(count,))
            self.first[:] = -1

    def roots(self, numbers: Numbers) -> Numbers:
        """The first record of each one's group, as far as it is known."""
        while True:
            above = self.first[numbers]
            if (above < 0).all():
                return numbers
            numbers = np.where(above < 0, numbers, above)

    def join(self, left: Numbers, right: Numbers) -> None:
        """These belong together pairwise."""
        # Imported on use: few recipes look for duplicates.
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        left, right = self.roots(left), self.roots(right)
        names, ends = np.unique(np.concatenate([left, right]), return_inverse=True)
        pair = (ends[: len(left)], ends[len(left) :])
        links = np.ones(len(left), np.int8)
        graph = coo_array((links, pair), shape=(len(names), len(names)))
        _, group = connected_components(graph, directed=False)
        _, leaders = np.unique(group, return_index=True)  # names are in order: the smallest
        first = names[leaders][group]
        later = first < names
        self.first[names[later]] = first[later]

    def settled(self) -> Numbers:
        """For each record −1, or the first of its group."""
        for start in range(0, len(self.first), _READ):
            part = self.first[start : start + _READ]
            linked = np.flatnonzero(part >= 0)
            part[linked] = self.roots(part[linked])
        return self.first
