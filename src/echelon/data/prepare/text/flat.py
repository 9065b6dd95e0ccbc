"""The texts of a block as one run of bytes, and what kind of character each byte belongs to.

Work on all of a block's bytes at once would go through main memory again and again: pieces of
them are made to fit into the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Whole = NDArray[np.int64]

SPACE, WORD, MARK, REST, DIGIT = 0, 1, 2, 4, 9
"""Kinds of bytes. Those of letters and digits are odd; REST is what follows a mark's first byte."""
_PIECE = 1 << 19
_HIGH = 0x80
_POINTS = 0x110000
_TEXT = pa.large_utf8()
_END, _NOTHING = pa.scalar("\n", _TEXT), pa.scalar("", _TEXT)


class Piece(NamedTuple):
    """Some texts, each with a line feed behind it: text i is `text[offsets[i]:offsets[i + 1]]`."""

    text: Bytes
    kinds: Bytes
    offsets: Whole


def plain(texts: Any) -> Any:
    """Texts of whatever Arrow type as one; a missing one is empty."""
    whole = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    whole = whole.cast(_TEXT)
    return whole.fill_null("") if whole.null_count else whole


def lowered(texts: Any) -> Any:
    """As `str.lower` has it: Arrow knows no letter that becomes two or depends on its place."""
    low = pc.utf8_lower(texts)
    foreign = np.flatnonzero(~_mask(pc.string_is_ascii(texts)))
    some = texts.take(pa.array(foreign))
    odd = _mask(pc.match_substring(some, "Σ")) | _mask(pc.match_substring(some, "İ"))
    if not odd.any():
        return low
    mended = [text.lower() for text in some.filter(pa.array(odd)).to_pylist()]
    where = np.zeros(len(texts), bool)
    where[foreign[odd]] = True
    return pc.replace_with_mask(low, pa.array(where), pa.array(mended, _TEXT))


def _mask(flags: Any) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = flags.to_numpy(zero_copy_only=False)
    return mask


def pieces(texts: Any) -> Iterator[Piece]:
    """All texts of an array that `plain` has made, some at a time."""
    ended = pc.binary_join_element_wise(texts, _END, _NOTHING)
    _, places, buffer = ended.buffers()
    offsets = np.frombuffer(places, np.int64, len(ended) + 1, ended.offset * 8)
    low = 0
    while low < len(ended):
        high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + _PIECE)))
        high = min(high, len(ended))
        start, size = int(offsets[low]), int(offsets[high] - offsets[low])
        text = buffer.slice(start, size).to_pybytes()
        yield Piece(np.frombuffer(text, np.uint8), _kinds(text), offsets[low : high + 1] - start)
        low = high


def _kinds(text: bytes) -> Bytes:
    kinds = np.frombuffer(bytearray(text.translate(_ascii_kinds())), np.uint8)
    if not text.isascii():
        _mend(np.frombuffer(text, np.uint8), kinds)
    return kinds


def _mend(text: Bytes, kinds: Bytes) -> None:
    """The kinds of characters of several bytes."""
    places = np.flatnonzero(text >= 0xC0)
    found, sizes = _kinds_by_point()[points(text, places)], lengths(text[places])
    rest = np.where(found == MARK, REST, found).astype(np.uint8)
    kinds[places] = found
    for further in (1, 2, 3):
        some = sizes > further
        kinds[places[some] + further] = rest[some]


def lengths(first: Bytes) -> Bytes:
    """How many bytes a character has, by its first one."""
    sizes = (first >= 0xC0).astype(np.uint8) + (first >= 0xE0)
    sizes += first >= 0xF0
    return sizes + 1


def points(text: Bytes, places: Whole) -> NDArray[np.uint32]:
    """The numbers of the characters that begin at these places."""
    first = text[places].astype(np.uint32)
    size = lengths(text[places])
    # A character of n bytes keeps 8, 5, 4 or 3 bits in the first and six in each of the others.
    found = first & np.array([0, 0x7F, 0x1F, 0x0F, 0x07], np.uint32)[size]
    for further in (1, 2, 3):
        some = size > further
        if some.any():
            found[some] = found[some] << 6 | (text[places[some] + further] & 0x3F)
    return found


@cache
def _kinds_by_point() -> Bytes:
    """Of every character there is, as Python's regular expressions see it."""
    characters = np.arange(_POINTS, dtype=np.uint32).view("U1")
    kinds = np.full(_POINTS, MARK, np.uint8)
    kinds[np.strings.isalnum(characters)] = WORD
    kinds[np.strings.isdecimal(characters)] = DIGIT
    kinds[np.strings.isspace(characters)] = SPACE
    kinds[ord("_")] = WORD
    return kinds


@cache
def _ascii_kinds() -> bytes:
    table = bytearray(256)
    for code in range(_HIGH):
        sign = chr(code)
        word = DIGIT if sign.isdecimal() else WORD if sign.isalnum() or sign == "_" else MARK
        table[code] = SPACE if sign.isspace() else word
    return bytes(table)
