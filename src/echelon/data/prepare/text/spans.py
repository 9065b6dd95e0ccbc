"""Tokens that are runs of bytes: every different one gets a number.

A token of up to seven bytes is a number itself: its bytes, and its length in the eighth. Most
tokens are, and numbers are told apart much faster than strings; the others are looked up as such.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare.text.flat import Bytes, Piece, Whole, pieces
from echelon.data.prepare.text.tokens import NONE, Tokens
from echelon.data.prepare.text.words import Cut

_SHORT = 7
_SIZES = np.arange(_SHORT + 1, dtype=np.uint64)
_MASKS = (np.uint64(1) << (_SIZES * np.uint64(8))) - np.uint64(1)
_TOPS = _SIZES << np.uint64(56)


class _Spans(NamedTuple):
    keys: NDArray[np.uint64]
    """Of each token; 0 for long ones."""
    places: Whole
    """Which tokens are long."""
    long: Any
    """Those as Arrow's strings."""
    counts: Whole
    """Tokens of each text."""


def by_bytes(texts: Any, cut: Callable[[Piece], Cut]) -> Tokens:
    """The tokens that `cut` finds in texts that `plain` has made."""
    parts = [_spans(piece, cut(piece)) for piece in pieces(texts)]
    codes, keys = _coded([pa.array(part.keys) for part in parts], pa.uint64())
    long_codes, long = _coded([part.long for part in parts], pa.utf8())
    terms = _terms(keys.to_numpy())
    if len(long):
        # The first long one takes the place of the key that stands for all of them.
        stand_in = int(np.flatnonzero(keys.to_numpy() == 0)[0])
        numbers = np.where(long_codes == 0, stand_in, long_codes + len(keys) - 1)
        starts = np.cumsum([0, *(len(part.keys) for part in parts[:-1])])
        at = [part.places + start for part, start in zip(parts, starts, strict=True)]
        codes[np.concatenate(at)] = numbers
        long = long.cast(pa.large_utf8())
        behind = [long.slice(0, 1), terms.slice(stand_in + 1), long.slice(1)]
        terms = pa.concat_arrays([terms.slice(0, stand_in), *behind])
    offsets = np.cumsum(np.concatenate([NONE, *(part.counts for part in parts)]))
    return Tokens(codes, offsets, terms)


def _spans(piece: Piece, cut: Cut) -> _Spans:
    inside, first = cut
    starts = np.flatnonzero(first)
    last = inside.copy()
    last[:-1] &= first[1:] | ~inside[1:]
    sizes = np.flatnonzero(last) - starts + 1
    short = np.where(sizes <= _SHORT, sizes, 0)
    eights = _eights(piece.text)[starts]
    eights &= _MASKS[short]
    eights |= _TOPS[short]
    places = np.flatnonzero(short == 0)
    counts = np.diff(np.searchsorted(starts, piece.offsets))
    return _Spans(eights, places, _long(piece.text, starts[places], sizes[places]), counts)


def _eights(text: Bytes) -> NDArray[np.uint64]:
    """The eight bytes from each place on."""
    padded = np.concatenate([text, np.zeros(_SHORT, np.uint8)])
    return np.ndarray((len(text),), "<u8", padded.data, strides=(1,))


def _long(text: Bytes, starts: Whole, sizes: Whole) -> Any:
    offsets = np.concatenate([NONE, np.cumsum(sizes)])
    at = np.repeat(starts - offsets[:-1], sizes)
    at += np.arange(offsets[-1])
    buffers = [pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(text[at])]
    return pa.StringArray.from_buffers(len(starts), *buffers)


def _coded(arrays: list[Any], kind: Any) -> tuple[NDArray[np.int32], Any]:
    """Numbers for all values, and the values they stand for."""
    coded = pa.chunked_array(arrays, kind).dictionary_encode()
    codes = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in coded.chunks]
    flat = np.concatenate([np.empty(0, np.int32), *codes])
    return flat, coded.chunk(0).dictionary if codes else pa.array([], kind)


def _terms(keys: NDArray[np.uint64]) -> Any:
    """The strings that keys stand for."""
    sizes = (keys >> np.uint64(56)).astype(np.int64)
    table = keys.astype("<u8").view(np.uint8).reshape(-1, 8)
    text = table[np.arange(8) < sizes[:, None]]
    offsets = np.concatenate([NONE, np.cumsum(sizes)])
    return pa.LargeStringArray.from_buffers(len(keys), pa.py_buffer(offsets), pa.py_buffer(text))
