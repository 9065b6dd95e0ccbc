"""One 64/128-bit hash for any Arrow column.

A 64-bit word for every value of an Arrow column: the same for the same value, on any machine.

Texts are taken eight bytes at a time, all of a column's at once, the longest first, so that those
which are over drop off the end:

    word 0 of all texts │ word 1 of those with more than 8 bytes │ word 2 of those with …
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.hashing import Words, key, words

# Values


LONG = 1024
"""A text of more bytes is hashed by itself: that is quicker than to wait for it."""


_ROWS = 1 << 14
"""Rows at a time: what they need stays in the processor's cache."""


_FACTOR = np.array(0x9E3779B97F4A7C15, np.uint64)


_HALF = np.array(32, np.uint64)


def hashed(column: Any) -> Words:
    """Words for the values of a column without missing ones: numbers, times or texts."""
    kind = column.type
    if pa.types.is_floating(kind):
        return _of_bits((column.to_numpy().astype(np.float64) + 0.0).view(np.uint64))
    if pa.types.is_integer(kind):
        return _of_bits(column.to_numpy().astype(np.int64, copy=False).view(np.uint64))
    if pa.types.is_temporal(kind):
        wide = pa.int32() if kind.bit_width == 32 else pa.int64()
        return _of_bits(column.view(wide).to_numpy().astype(np.int64).view(np.uint64))
    return _of_texts(column.cast(pa.large_binary()))


def _of_bits(bits: Words) -> Words:
    out = np.empty(len(bits), np.uint64)
    for start in range(0, len(bits), _ROWS):
        out[start : start + _ROWS] = words(bits[start : start + _ROWS], 1)
    return out


def _of_texts(column: Any) -> Words:
    lengths = pc.binary_length(column).to_numpy()
    out = np.empty(len(column), np.uint64)
    long = np.flatnonzero(lengths > LONG)
    for row in long.tolist():
        digest = hashlib.sha256(column[row].as_buffer()).digest()[:8]
        out[row] = int.from_bytes(digest, "little")
    short = column if not len(long) else column.filter(pa.array(lengths <= LONG))
    where = slice(None) if not len(long) else np.flatnonzero(lengths <= LONG)
    if len(short):
        out[where] = _of_short_texts(short)
    return out


def _of_short_texts(column: Any) -> Words:
    offsets = np.frombuffer(column.buffers()[1], np.int64)
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    # Eight bytes more, because the last word of the last text is read whole too.
    content = np.zeros(last - first + 8, np.uint8)
    if last > first:
        content[: last - first] = np.frombuffer(column.buffers()[2], np.uint8)[first:last]
    at_byte = np.ndarray(last - first + 1, "<u8", content, strides=(1,))
    out = np.empty(len(column), np.uint64)
    for start in range(0, len(column), _ROWS):
        piece = offsets[start : start + _ROWS + 1] - first
        out[start : start + _ROWS] = _mixed(at_byte, piece[:-1], np.diff(piece))
    return words(out, 1)


def _mixed(at_byte: Words, starts: Any, lengths: Any) -> Words:
    count = ((lengths + 7) >> 3).astype(np.uint16)
    order = np.argsort(count, kind="stable")[::-1]
    starts, lengths = starts[order], lengths[order]
    more = np.cumsum(np.bincount(count)[::-1])[::-1].tolist()  # more[j]: texts of j words or more
    state = lengths.astype(np.uint64)
    for number, alive in enumerate(more[1:]):
        word = at_byte[starts[:alive] + 8 * number]
        over = more[number + 2] if number + 2 < len(more) else 0
        left = (8 * (lengths[over:alive] - 8 * number)).astype(np.uint64)
        word[over:] &= np.uint64(0xFFFFFFFFFFFFFFFF) >> (np.uint64(64) - left)
        now = state[:alive]
        now ^= word
        now *= _FACTOR
        now ^= now >> _HALF
    out: Words = np.empty_like(state)
    out[order] = state
    return out


def can_be_hashed(kind: Any) -> bool:
    """Whether `hashed` knows this type."""
    text = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    text = text or pa.types.is_string(kind) or pa.types.is_binary(kind)
    span = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    return text or span or pa.types.is_integer(kind) or pa.types.is_floating(kind)


# Rows


LONG_TEXT = 4096
"""A row of more bytes is hashed by itself: that is quicker than to wait for it."""


_FINGERPRINT_ROWS = 1 << 14
"""Rows at a time: what they need stays in the processor's cache."""


_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)


_MISSING = np.array([key(0xF1, lane) for lane in range(2)], np.uint64)


_ALL_BITS = np.uint64(0xFFFFFFFFFFFFFFFF)


def fingerprints(columns: Sequence[Any]) -> NDArray[np.uint64]:
    """[rows, 2]: two words for each row of these columns."""
    if len(columns) > 1:
        return of_bytes(_rows(columns))
    # The text itself is enough, but for one that is missing.
    text = _text(columns[0])
    found = of_bytes(text.fill_null(b""))
    if text.null_count:
        found[text.is_null().to_numpy(zero_copy_only=False)] = _MISSING
    return found


def _rows(columns: Sequence[Any]) -> Any:
    """Each row as bytes, so that rows which differ anywhere differ in them.

    A cell is its length and its text, or a mark that it is missing: nothing can be shifted from
    one cell to the next.
    """
    cells = []
    for column in columns:
        text = _text(column)
        size = pc.binary_length(text).cast(pa.large_utf8()).cast(pa.large_binary())
        cells += [size.fill_null(b"-"), text.fill_null(b"")]
    return pc.binary_join_element_wise(*cells, pa.scalar(b"\x1f", pa.large_binary()))


def _text(column: Any) -> Any:
    kind = column.type
    if pa.types.is_large_binary(kind):
        return column
    if pa.types.is_nested(kind) or isinstance(kind, pa.ExtensionType):
        rows = [None if row is None else repr(row).encode() for row in column.to_pylist()]
        return pa.array(rows, pa.large_binary())
    if pa.types.is_floating(kind):
        # −0.0 equals 0.0, and every NaN is like every other.
        column = pc.add(column, pa.scalar(0.0, kind))
    if not (pa.types.is_large_string(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        column = column.cast(pa.large_utf8())
    return column.cast(pa.large_binary())


def of_bytes(rows: Any) -> NDArray[np.uint64]:
    """Of an array of large binaries without nulls."""
    lengths = pc.binary_length(rows).to_numpy(zero_copy_only=False).astype(np.int64)
    out = np.empty((len(rows), 2), np.uint64)
    for row in np.flatnonzero(lengths > LONG_TEXT).tolist():
        digest = hashlib.blake2b(rows[row].as_buffer(), digest_size=16).digest()
        out[row] = np.frombuffer(digest, "<u8")
    short = lengths <= LONG_TEXT
    if not short.any():
        return out
    _, places, buffer = rows.buffers()
    offsets = np.frombuffer(places, np.int64, len(rows) + 1, 8 * rows.offset)
    starts = offsets[:-1][short] - offsets[0]
    size = int(offsets[-1] - offsets[0])
    # Eight bytes more, because the last word of the last row is read whole too.
    content = np.zeros(size + 8, np.uint8)
    if size:
        content[:size] = np.frombuffer(buffer, np.uint8)[offsets[0] : offsets[-1]]
    at_byte = np.ndarray(size + 1, "<u8", content, strides=(1,))
    where = np.flatnonzero(short)
    for first in range(0, len(where), _FINGERPRINT_ROWS):
        piece = slice(first, first + _FINGERPRINT_ROWS)
        out[where[piece]] = _mixed_words(at_byte, starts[piece], lengths[where[piece]])
    return out


def _mixed_words(
    at_byte: Words, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint64]:
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    states = [words(lengths.astype(np.uint64), lane + 1) for lane in range(2)]
    for number in range((int(lengths[0]) + 7) // 8 if len(lengths) else 0):
        alive = int(np.searchsorted(-lengths, -8 * number, side="left"))
        word = at_byte[starts[:alive] + 8 * number]
        left = np.minimum(lengths[:alive] - 8 * number, 8).astype(np.uint64)
        word &= _ALL_BITS >> (np.uint64(64) - np.uint64(8) * left)
        for state, factor, shift in zip(states, _FACTORS, (32, 29), strict=True):
            now = state[:alive]
            now ^= word
            now *= factor
            now ^= now >> np.uint64(shift)
    out = np.empty((len(lengths), 2), np.uint64)
    for lane, state in enumerate(states):
        out[order, lane] = words(state, lane + 3)
    return out


# Terms


Hashes = NDArray[np.uint64]


_STRING, _LEFT, _JOINED = (key(0x7E47, part) for part in range(3))


_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def hashes(terms: Any) -> Hashes:
    """Of an Arrow array of large strings without nulls, eight bytes of each at a time."""
    count = len(terms)
    _, places, buffer = terms.buffers()
    offsets = np.frombuffer(places, np.int64, count + 1, terms.offset * 8)
    padded = (buffer.to_pybytes() if buffer else b"") + bytes(8)
    eights = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))
    at, left = offsets[:-1].copy(), np.diff(offsets)
    found = words(left.astype(np.uint64), _STRING)
    going = np.flatnonzero(left)
    while len(going):
        taken = np.minimum(left[going], 8)
        mask = _ALL >> (8 * (8 - taken)).astype(np.uint64)
        found[going] = words(found[going] ^ (eights[at[going]] & mask), _STRING)
        at[going] += taken
        left[going] -= taken
        going = going[left[going] > 0]
    return found


def joined(left: Hashes, right: Hashes) -> Hashes:
    """Of a term and a token behind it; (a, b) and (b, a) differ."""
    return words(words(left, _LEFT) ^ right, _JOINED)
