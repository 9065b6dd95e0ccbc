"""Exact and near duplicates: the first record stays, later ones are dropped.

    blocks ─ hashes() ─▶ keys on disk (Shelf) ─ met() ─▶ pairs with equal keys ─▶ groups (Links)

Workers hash every block (`Duplicates.hashes`). The parent then compares the keys of all records
(`Duplicates.duplicates`). Exact duplicates have equal fingerprints. Near duplicates are texts that
share a band of their MinHash signature and whose signatures agree well enough.

Keys are on disk, and are compared one column at a time and, for large data, one part of their range
at a time. So memory does not grow with the number of records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.core.hashing import key, keys, words
from echelon.data.hashing import fingerprints
from echelon.data.prepare.steps import Step, is_text


class Duplicates(Step):
    """Drop records that equal or nearly equal an earlier one.

    `near` is the share of runs of five characters that two texts must have in common; 0.8 is about
    one changed word in twenty. Chains count: a record near a dropped one is dropped, too.
    """

    kind: Literal["duplicates"] = "duplicates"
    columns: tuple[str, ...] | None = None
    """The columns that are compared; all if not given."""
    near: Annotated[float, Field(ge=0.3, lt=1)] | None = None

    def reads(self) -> list[str]:
        return list(self.columns or ())

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        texts = [name for name in self.columns or names if is_text(names[name])]
        if self.near is not None and not texts:
            raise DataError("step duplicates: near compares texts: name columns of text")
        return after

    def hashes(self, block: pa.RecordBatch) -> dict[str, Any]:
        """Return a few numbers for each row of a block, by which it is compared with all others."""
        names = self.columns or tuple(block.schema.names)
        chosen = [block.column(name) for name in names]
        if self.near is None:
            return {"exact": fingerprints(chosen)}
        texts = [column for column in chosen if is_text(column.type)]
        others = [column for column in chosen if not is_text(column.type)]
        bands, marks = sketched(_joined(texts), self.near)
        if others:  # columns other than text must be equal
            bands ^= (fingerprints(others)[:, :1] >> np.uint64(32)).astype(np.uint32)
        return {"bands": bands, "marks": marks}

    def duplicates(self, keys: Iterable[Mapping[str, Any]], scratch: Path) -> Numbers:
        """Return for each record the number of the first one that it repeats, or −1.

        `keys` are the results of `hashes` for all blocks in order. Files go to `scratch`.
        """
        scratch.mkdir(parents=True, exist_ok=True)
        return _exact(keys, scratch) if self.near is None else _near(keys, scratch, self.near)


def _joined(texts: list[Any]) -> Any:
    plain = [text.fill_null("").cast(pa.large_utf8()) for text in texts]
    if len(plain) == 1:
        return plain[0]
    return pc.binary_join_element_wise(*plain, pa.scalar("\n", pa.large_utf8()))


def _exact(keys: Iterable[Mapping[str, Any]], scratch: Path) -> Numbers:
    shelf = Shelf(scratch / "exact", np.uint64, 2)
    for one in keys:
        shelf.add(one["exact"])
    links = Links(shelf.rows, scratch / "first")
    for later, first, _ in met(shelf):
        links.first[later] = first
    return links.first


def _near(keys: Iterable[Mapping[str, Any]], scratch: Path, near: float) -> Numbers:
    count, _ = banding(near)
    bands = [Shelf(scratch / f"band-{band}", np.uint32) for band in range(count)]
    marks = Shelf(scratch / "marks", np.uint8, BINS)
    for one in keys:
        marks.add(one["marks"])
        for band, shelf in enumerate(bands):
            shelf.add(one["bands"][:, band])
    links = Links(marks.rows, scratch / "first")
    for shelf in bands:
        for later, first, before in met(shelf):
            # Not all pairs of a large group are compared: other bands find the missing ones.
            for other in (first, before):
                _join_alike(links, marks, other, later, near)
    return links.settled()


def _join_alike(links: Links, marks: Shelf, left: Numbers, right: Numbers, near: float) -> None:
    """Link the pairs that are not linked yet and whose texts really are near each other."""
    for start in range(0, len(left), _PAIRS):
        a, b = left[start : start + _PAIRS], right[start : start + _PAIRS]
        new = links.roots(a) != links.roots(b)
        a, b = a[new], b[new]
        if not len(a):
            continue
        near_enough = alike(*marks.taken(a, b)) >= near
        if near_enough.any():
            links.join(a[near_enough], b[near_enough])


_PAIRS = 1 << 14
"""Pairs of records compared at a time."""


# MinHash: keys that bring similar texts together, and marks that show how similar they are

BINS = 128
SHINGLE = 5
_BIN_BITS = BINS.bit_length() - 1
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(SHINGLE, dtype=np.uint64)
_PAD = "\0" * SHINGLE
_PIECE = 1 << 17
"""Bytes of text hashed at a time, so that intermediate results stay in the processor's cache."""
_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)
_ROUND, _BAND, _SHINGLE = (key(0x5417, part) for part in range(3))
_EMPTY = np.uint64(key(0x5417, 3))


def sketched(text: Any, near: float) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return keys [rows, bands] and marks [rows, BINS] of texts.

    Texts that share a key are compared by their marks.
    """
    plain = text.fill_null("")
    ends = np.cumsum(pc.binary_length(plain).to_numpy(zero_copy_only=False).astype(np.int64))
    found = []
    start = 0
    while start < len(plain):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _PIECE, side="right")))
        signs = signatures(plain[start:stop].to_pylist())
        found.append((_bands(signs, near), (signs & np.uint64(0xFF)).astype(np.uint8)))
        start = stop
    if not found:
        return np.zeros((0, banding(near)[0]), np.uint32), np.zeros((0, BINS), np.uint8)
    codes, marks = zip(*found, strict=True)
    return np.concatenate(codes), np.concatenate(marks)


def banding(near: float) -> tuple[int, int]:
    """Return the number of bands and of bins per band.

    Texts `near` each other share a band with a probability of at least 98 %. Among such choices the
    one with the most bins per band is taken, because then the fewest dissimilar texts share a band.
    """
    for rows in range(BINS // 2, 1, -1):
        bands = min(BINS // rows, 32)
        if 1 - (1 - near**rows) ** bands >= 0.98:
            return bands, rows
    return 64, 1


def signatures(texts: list[str]) -> NDArray[np.uint64]:
    """Return MinHash signatures [rows, BINS]: the smallest hash of each bin.

    A text is the set of its shingles: runs of five characters, ignoring case and runs of blanks.
    One hash per shingle falls into one of 128 bins, and the smallest of each bin counts. The chance
    that two texts agree in a bin is the share of shingles they have in common (Jaccard similarity).
    """
    points, row = characters(texts)
    hashes = points.astype(np.uint64)
    for place in range(1, SHINGLE):
        hashes[:-place] += points[place:] * _POWERS[place]
    # A shingle may reach into the zeros after its text, but not into the next text.
    at = np.flatnonzero(points)
    hashes = words(hashes[at], _SHINGLE)
    bins = row[at] * BINS
    bins += (hashes >> np.uint64(64 - _BIN_BITS)).astype(np.int64)
    out = np.full(len(texts) * BINS, _NONE, np.uint64)
    np.minimum.at(out, bins, hashes)
    return _filled(out.reshape(len(texts), BINS))


def characters(texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the characters of all texts, with zeros after each text, and the text of each."""
    whole = _PAD.join(texts) + _PAD
    if whole.count("\0") != SHINGLE * len(texts):
        whole = _PAD.join([text.replace("\0", " ") for text in texts]) + _PAD
    points = np.frombuffer(whole.lower().encode("utf-32-le"), np.uint32).copy()
    blank = (points <= 32) & (points > 0)
    blank |= (points == 0xA0) | (points == 0x3000)
    points[blank] = 32
    blank[1:] &= blank[:-1]
    blank[0] = False
    points = points[~blank]
    return points, np.cumsum(points == 0) // SHINGLE


def _filled(signs: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Fill bins without a shingle from other bins, in an order that is the same for all texts."""
    has = signs != _NONE
    signs[~has.any(1)] = _EMPTY  # empty texts are equal
    rows, bins = np.nonzero(~has & has.any(1)[:, None])
    for lenders in _lenders():
        if not len(rows):
            break
        lender = lenders[bins]
        found = has[rows, lender]
        signs[rows[found], bins[found]] = signs[rows[found], lender[found]]
        rows, bins = rows[~found], bins[~found]
    return signs


@lru_cache
def _lenders() -> tuple[NDArray[np.int64], ...]:
    """Return the bins that each bin borrows from, in order: first random ones, then all in turn."""
    own = np.arange(BINS)
    drawn = [(keys(BINS, _ROUND, turn) % np.uint64(BINS)).astype(np.int64) for turn in range(32)]
    return (*drawn, *((own + step) % BINS for step in range(1, BINS)))


def _bands(signs: NDArray[np.uint64], near: float) -> NDArray[np.uint32]:
    count, rows = banding(near)
    out = np.empty((len(signs), count), np.uint32)
    for band in range(count):
        state = np.full(len(signs), band, np.uint64)
        for place in range(band * rows, (band + 1) * rows):
            state = words(state ^ signs[:, place], _BAND)
        out[:, band] = (state >> np.uint64(32)).astype(np.uint32)
    return out


def alike(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Estimate the share of shingles that texts have in common, from their marks.

    Marks are one byte per bin. Those of different hashes agree by chance in one of 256 cases, which
    is subtracted.
    """
    agree: NDArray[np.float64] = (left == right).mean(1)
    return np.maximum(0.0, (agree - 1 / 256) / (1 - 1 / 256))


# Equal keys on disk, and the groups they form

PART = 2_000_000
"""Records sorted at a time, about."""
_READ = 1 << 20
Numbers = NDArray[np.int64]


class Shelf:
    """An array on disk that grows row by row."""

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
        """Yield the array in pieces: the number of the first row, and the rows."""
        size = self._dtype.itemsize * self._width
        with self._path.open("rb") as file:
            at = 0
            while data := file.read(_READ * size):
                piece = np.frombuffer(data, self._dtype).reshape(-1, self._width)
                yield at, piece
                at += len(piece)

    def taken(self, *chosen: Numbers) -> list[NDArray[Any]]:
        """Return the rows with these numbers. The pages read for that do not stay in memory."""
        size = self.rows * self._width * self._dtype.itemsize
        with self._path.open("rb") as file, mmap(file.fileno(), size, access=ACCESS_READ) as whole:
            rows = np.frombuffer(whole, self._dtype).reshape(self.rows, self._width)
            found = [rows[numbers] for numbers in chosen]
            del rows  # a map with a view on it cannot be closed
        return found


def met(shelf: Shelf) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """Yield records with the key of an earlier one, the first with that key, and the one before.

    Keys are evenly distributed, so equal parts of their range hold about equally many records.
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
    """Return the records whose key is in this part of the range, and their keys."""
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
    """Groups of records: an array on disk of links to an earlier record of the group, −1 for
    none."""

    def __init__(self, count: int, path: Path) -> None:
        self.first: Numbers = np.zeros(0, np.int64)
        if count:
            self.first = np.memmap(path, np.int64, "w+", shape=(count,))
            self.first[:] = -1

    def roots(self, numbers: Numbers) -> Numbers:
        """Return the first record of each record's group, as linked so far."""
        while True:
            above = self.first[numbers]
            if (above < 0).all():
                return numbers
            numbers = np.where(above < 0, numbers, above)

    def join(self, left: Numbers, right: Numbers) -> None:
        """Link each record of `left` with the one of `right` at the same place."""
        # Imported on use: few recipes look for near duplicates.
        from scipy.sparse import coo_array
        from scipy.sparse.csgraph import connected_components

        left, right = self.roots(left), self.roots(right)
        names, ends = np.unique(np.concatenate([left, right]), return_inverse=True)
        pair = (ends[: len(left)], ends[len(left) :])
        links = np.ones(len(left), np.int8)
        graph = coo_array((links, pair), shape=(len(names), len(names)))
        _, group = connected_components(graph, directed=False)
        _, leaders = np.unique(
            group, return_index=True
        )  # names are sorted, so this is the smallest
        first = names[leaders][group]
        later = first < names
        self.first[names[later]] = first[later]

    def settled(self) -> Numbers:
        """Return for each record the first of its group, or −1 if it is that first one."""
        for start in range(0, len(self.first), _READ):
            part = self.first[start : start + _READ]
            linked = np.flatnonzero(part >= 0)
            part[linked] = self.roots(part[linked])
        return self.first
