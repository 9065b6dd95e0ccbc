"""A 64-bit word for every value of an Arrow column: the same for the same value, on any machine.

Texts are taken eight bytes at a time, all of a column's at once, the longest first, so that those
which are over drop off the end:

    word 0 of all texts │ word 1 of those with more than 8 bytes │ word 2 of those with …
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.hashing import Words, words

LONG = 1024
"""A text of more bytes is hashed by itself: that is quicker than to wait for it."""
_FACTOR = np.array(0x9E3779B97F4A7C15, np.uint64)
_HALF = np.array(32, np.uint64)
_ROWS = 1 << 14
"""Rows at a time: what they need stays in the processor's cache."""


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


def can_be_hashed(kind: Any) -> bool:
    """Whether `hashed` knows this type."""
    text = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    text = text or pa.types.is_string(kind) or pa.types.is_binary(kind)
    span = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    return text or span or pa.types.is_integer(kind) or pa.types.is_floating(kind)


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
