"""Hashes of Arrow columns that are the same on any machine and in any process.

    hashed(column)         one 64-bit word per value: numbers, times, texts    (counting values)
    fingerprints(columns)  two 64-bit words per row of several columns         (finding duplicates)
    hashes(terms)          one 64-bit word per text, combined by `joined`      (terms and n-grams)

The three give different words for the same text, and recipes and sketches depend on each, so they
stay apart. All of them read texts eight bytes at a time, the same word of many texts at once.
`hashed` and `fingerprints` sort the texts by length first, so that those which have ended drop off
the end of the array:

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

_ROWS = 1 << 14
"""Rows hashed at a time: their working memory stays in the processor's cache."""
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


# Values

LONG_VALUE = 1024
"""A text with more bytes is hashed alone by SHA-256: the others need not wait for its end."""
_FACTOR = np.array(0x9E3779B97F4A7C15, np.uint64)
_HALF = np.array(32, np.uint64)


def hashed(column: Any) -> Words:
    """Return a word for each value of a column of numbers, times or texts without nulls."""
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
    long = np.flatnonzero(lengths > LONG_VALUE)
    for row in long.tolist():
        digest = hashlib.sha256(column[row].as_buffer()).digest()[:8]
        out[row] = int.from_bytes(digest, "little")
    short = column if not len(long) else column.filter(pa.array(lengths <= LONG_VALUE))
    where = slice(None) if not len(long) else np.flatnonzero(lengths <= LONG_VALUE)
    if len(short):
        out[where] = _of_short_texts(short)
    return out


def _of_short_texts(column: Any) -> Words:
    eights, offsets = _eights(column)
    out = np.empty(len(column), np.uint64)
    for start in range(0, len(column), _ROWS):
        piece = offsets[start : start + _ROWS + 1]
        out[start : start + _ROWS] = _mix_values(eights, piece[:-1], np.diff(piece))
    return words(out, 1)


def _eights(column: Any) -> tuple[Words, NDArray[np.int64]]:
    """Return the eight bytes at every place of a large binary or string column, and its offsets.

    Word i holds bytes i to i + 7. Eight zero bytes follow the last value, because its last word is
    read in full.
    """
    _, places, buffer = column.buffers()
    offsets = np.frombuffer(places, np.int64, len(column) + 1, 8 * column.offset)
    first, last = int(offsets[0]), int(offsets[-1])
    content = np.zeros(last - first + 8, np.uint8)
    if last > first:
        content[: last - first] = np.frombuffer(buffer, np.uint8)[first:last]
    return np.ndarray(last - first + 1, "<u8", content, strides=(1,)), offsets - first


def _mix_values(eights: Words, starts: Any, lengths: Any) -> Words:
    count = ((lengths + 7) >> 3).astype(np.uint16)
    order = np.argsort(count, kind="stable")[::-1]
    starts, lengths = starts[order], lengths[order]
    more = np.cumsum(np.bincount(count)[::-1])[::-1].tolist()  # more[j]: texts of j words or more
    state = lengths.astype(np.uint64)
    for number, alive in enumerate(more[1:]):
        word = eights[starts[:alive] + 8 * number]
        over = more[number + 2] if number + 2 < len(more) else 0
        left = (8 * (lengths[over:alive] - 8 * number)).astype(np.uint64)
        word[over:] &= _ALL >> (np.uint64(64) - left)
        now = state[:alive]
        now ^= word
        now *= _FACTOR
        now ^= now >> _HALF
    out: Words = np.empty_like(state)
    out[order] = state
    return out


# Rows

LONG_ROW = 4096
"""A row with more bytes is hashed alone by BLAKE2: the others need not wait for its end."""
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
_MISSING = np.array([key(0xF1, lane) for lane in range(2)], np.uint64)


def fingerprints(columns: Sequence[Any]) -> NDArray[np.uint64]:
    """Return two words for each row of these columns, [rows, 2]. Nulls are allowed."""
    if len(columns) > 1:
        return _of_rows(_rows(columns))
    # A single column needs no lengths between its cells; only nulls must differ from empty texts.
    text = _text(columns[0])
    found = _of_rows(text.fill_null(b""))
    if text.null_count:
        found[text.is_null().to_numpy(zero_copy_only=False)] = _MISSING
    return found


def _rows(columns: Sequence[Any]) -> Any:
    """Return each row as bytes; different rows give different bytes.

    A cell is its length and its text, or a mark for a null. Because of the lengths, ("ab", "c") and
    ("a", "bc") differ.
    """
    cells = []
    for column in columns:
        text = _text(column)
        size = pc.binary_length(text).cast(pa.large_utf8()).cast(pa.large_binary())
        cells += [size.fill_null(b"-"), text.fill_null(b"")]
    return pc.binary_join_element_wise(*cells, pa.scalar(b"\x1f", pa.large_binary()))


def _text(column: Any) -> Any:
    """Return a column as large binaries: texts as they are, other values as they are written."""
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


def _of_rows(rows: Any) -> NDArray[np.uint64]:
    """Return two words for each value of an array of large binaries without nulls."""
    lengths = pc.binary_length(rows).to_numpy(zero_copy_only=False).astype(np.int64)
    out = np.empty((len(rows), 2), np.uint64)
    for row in np.flatnonzero(lengths > LONG_ROW).tolist():
        digest = hashlib.blake2b(rows[row].as_buffer(), digest_size=16).digest()
        out[row] = np.frombuffer(digest, "<u8")
    short = lengths <= LONG_ROW
    if not short.any():
        return out
    eights, offsets = _eights(rows)
    starts, where = offsets[:-1][short], np.flatnonzero(short)
    for first in range(0, len(where), _ROWS):
        piece = slice(first, first + _ROWS)
        out[where[piece]] = _mix_rows(eights, starts[piece], lengths[where[piece]])
    return out


def _mix_rows(
    eights: Words, starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint64]:
    order = np.argsort(-lengths, kind="stable")
    starts, lengths = starts[order], lengths[order]
    states = [words(lengths.astype(np.uint64), lane + 1) for lane in range(2)]
    for number in range((int(lengths[0]) + 7) // 8 if len(lengths) else 0):
        alive = int(np.searchsorted(-lengths, -8 * number, side="left"))
        word = eights[starts[:alive] + 8 * number]
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


# Terms

Hashes = NDArray[np.uint64]
_STRING, _LEFT, _JOINED = (key(0x7E47, part) for part in range(3))


def hashes(terms: Any) -> Hashes:
    """Return a word for each value of an array of large strings without nulls."""
    eights, offsets = _eights(terms)
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
    """Return the hash of a term followed by a token; (a, b) and (b, a) differ."""
    return words(words(left, _LEFT) ^ right, _JOINED)
