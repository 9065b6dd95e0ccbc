"""The tokens of a block: every different one once, and numbers for their occurrences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare.text.flat import Whole, pieces, points

_TEXT = pa.large_utf8()
NONE: NDArray[np.int64] = np.zeros(1, np.int64)


class Tokens(NamedTuple):
    """Text i consists of `codes[offsets[i]:offsets[i + 1]]`, numbers of `terms`."""

    codes: NDArray[np.int32]
    offsets: Whole
    terms: Any
    """Arrow's strings, each of them once."""

    def only(self, wanted: NDArray[np.bool_]) -> Tokens:
        """Without the terms that are not wanted."""
        if wanted.all():
            return self
        numbers = np.cumsum(wanted, dtype=np.int32) - 1
        kept = wanted[self.codes]
        before = np.concatenate([[0], np.cumsum(kept)])
        terms = self.terms.filter(pa.array(wanted))
        return Tokens(numbers[self.codes[kept]], before[self.offsets], terms)

    def rows(self) -> NDArray[np.int32]:
        """The text of each occurrence."""
        count = len(self.offsets) - 1
        return np.repeat(np.arange(count, dtype=np.int32), np.diff(self.offsets))


def numbered(parts: Iterable[tuple[Any, Whole]]) -> Tokens:
    """Tokens of some texts after the other as Arrow's strings, and how many each text has."""
    arrays, counts = [], [NONE]
    for strings, lengths in parts:
        arrays.append(strings)
        counts.append(lengths)
    coded = pa.chunked_array(arrays, pa.utf8()).dictionary_encode()
    codes = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in coded.chunks]
    flat = np.concatenate([np.empty(0, np.int32), *codes])
    terms = coded.chunk(0).dictionary if codes else pa.array([], pa.utf8())
    return Tokens(flat, np.cumsum(np.concatenate(counts)), terms.cast(_TEXT))


def by_characters(texts: Any) -> Tokens:
    """One token per character. A character is a number already: nothing has to be looked up."""
    found, counts = [np.empty(0, np.uint32)], [NONE]
    for piece in pieces(texts):
        begins = (piece.text & 0xC0) != 0x80
        begins[piece.offsets[1:] - 1] = False
        places = np.flatnonzero(begins)
        counts.append(np.diff(np.searchsorted(places, piece.offsets)))
        found.append(points(piece.text, places))
    flat = np.concatenate(found)
    seen = np.bincount(flat) > 0
    numbers = np.cumsum(seen, dtype=np.int32) - 1
    terms = pa.array(list(map(chr, np.flatnonzero(seen).tolist())), _TEXT)
    return Tokens(numbers[flat], np.cumsum(np.concatenate(counts)), terms)
