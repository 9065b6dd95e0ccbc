"""128 bits for every row of a block: alike for rows that are alike, on any machine.

Rows are turned into bytes, which are taken eight at a time, of all rows at once, the longest
first, so that those which are over drop off the end.
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

LONG = 4096
"""A row of more bytes is hashed by itself: that is quicker than to wait for it."""
_ROWS = 1 << 14
"""Rows at a time: what they need stays in the processor's cache."""
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_MISSING = np.array([key(0xF1, lane) for lane in range(2)], np.uint64)
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


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
    for row in np.flatnonzero(lengths > LONG).tolist():
        digest = hashlib.blake2b(rows[row].as_buffer(), digest_size=16).digest()
        out[row] = np.frombuffer(digest, "<u8")
    short = lengths <= LONG
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
    for first in range(0, len(where), _ROWS):
        piece = slice(first, first + _ROWS)
        out[where[piece]] = _mixed(at_byte, starts[piece], lengths[where[piece]])
    return out


def _mixed(
    at_byte: Words, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint64]:
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    states = [words(lengths.astype(np.uint64), lane + 1) for lane in range(2)]
    for number in range((int(lengths[0]) + 7) // 8 if len(lengths) else 0):
        alive = int(np.searchsorted(-lengths, -8 * number, side="left"))
        word = at_byte[starts[:alive] + 8 * number]
        left = np.minimum(lengths[:alive] - 8 * number, 8).astype(np.uint64)
        word &= _ALL >> (np.uint64(64) - np.uint64(8) * left)
        for state, factor, shift in zip(states, _FACTORS, (32, 29), strict=True):
            now = state[:alive]
            now ^= word
            now *= factor
            now ^= now >> np.uint64(shift)
    out = np.empty((len(lengths), 2), np.uint64)
    for lane, state in enumerate(states):
        out[order, lane] = words(state, lane + 3)
    return out
