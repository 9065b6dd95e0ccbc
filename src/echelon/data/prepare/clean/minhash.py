"""Signatures that say how alike two texts are, and keys that bring those alike together.

A text is the set of its shingles: runs of five characters, case and blanks aside. One hash per
shingle falls into one of 128 bins, and of each bin the smallest counts; the chance that two texts
agree in a bin is the part of their shingles that they share (Jaccard). Bins without a shingle
borrow from others that have one, chosen alike for all texts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.hashing import key, keys, words

BINS = 128
SHINGLE = 5
_PIECE = 1 << 17
"""Bytes at a time: what is made of them stays in the processor's cache."""
_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)
_ROUND, _BAND, _SHINGLE = (key(0x5417, part) for part in range(3))
_EMPTY = np.uint64(key(0x5417, 3))
_BIN_BITS = BINS.bit_length() - 1
_POWERS = np.uint64(0x9E3779B97F4A7C15) ** np.arange(SHINGLE, dtype=np.uint64)
_PAD = "\0" * SHINGLE


def banding(near: float) -> tuple[int, int]:
    """Bands and bins per band, so that texts `near` each other meet with a chance of 98 %.

    The more bins a band has, the fewer texts meet that are not alike.
    """
    for rows in range(BINS // 2, 1, -1):
        bands = min(BINS // rows, 32)
        if 1 - (1 - near**rows) ** bands >= 0.98:
            return bands, rows
    return 64, 1


def sketched(text: Any, near: float) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Keys [rows, bands]: texts that share one are to be compared; marks [rows, BINS] for that."""
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


def signatures(texts: list[str]) -> NDArray[np.uint64]:
    """[rows, BINS]: of each bin the smallest hash."""
    points, row = characters(texts)
    hashes = points.astype(np.uint64)
    for place in range(1, SHINGLE):
        hashes[:-place] += points[place:] * _POWERS[place]
    # A shingle may run over its text's end into the zeros behind it, but into no other text.
    at = np.flatnonzero(points)
    hashes = words(hashes[at], _SHINGLE)
    bins = row[at] * BINS
    bins += (hashes >> np.uint64(64 - _BIN_BITS)).astype(np.int64)
    out = np.full(len(texts) * BINS, _NONE, np.uint64)
    np.minimum.at(out, bins, hashes)
    return _filled(out.reshape(len(texts), BINS))


def characters(texts: list[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The characters of all texts with zeros behind each, and which text they belong to."""
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
    """Bins without a shingle borrow of others, tried in an order that is the same for all texts."""
    has = signs != _NONE
    signs[~has.any(1)] = _EMPTY  # texts with nothing in them are alike
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
    """Whom each bin asks first, second, …: at random for a while, then all one after the other."""
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
    """The part of their shingles that texts share, by their marks.

    Bytes of bins that differ agree by chance in one of 256 cases, which is taken off.
    """
    agree: NDArray[np.float64] = (left == right).mean(1)
    return np.maximum(0.0, (agree - 1 / 256) / (1 - 1 / 256))
