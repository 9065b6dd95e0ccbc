"""Terms of a block → their numbers in a vocabulary, and how often each text has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.flat import Whole
from echelon.data.prepare.text.grams import hashed, slices
from echelon.data.prepare.text.hashes import hashes
from echelon.data.prepare.text.records import is_new
from echelon.data.prepare.text.tokens import Tokens

_CACHED, _SLICE = 1 << 17, 1 << 20
"""Tokens at one time: as many as are sorted quickly, or as are worth a table of the vocabulary."""


class Counts(NamedTuple):
    """Row i of a CSR matrix is `indices[offsets[i]:offsets[i + 1]]`, in ascending order."""

    indices: NDArray[np.int32]
    values: NDArray[np.float64]
    offsets: Whole

    def rows(self) -> Whole:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def numbers_of(terms: Any, vocabulary: Any) -> NDArray[np.int32]:
    """The places of the terms in the vocabulary, −1 for others."""
    found = pc.index_in(terms, vocabulary).fill_null(-1)
    numbers: NDArray[np.int32] = np.asarray(found, np.int32)
    return numbers


def count_known(tokens: Tokens, learnt: Learnt, n: int) -> Counts:
    """Terms of 1 … n tokens, counted per text by their numbers in the vocabulary."""
    width = len(learnt["hashes"])
    return gathered(_places(tokens, learnt, n), width)


def gathered(places: Iterator[tuple[Any, Any, int]], width: int) -> Counts:
    """(numbers, rows, count of rows) of some texts after the others → how often each is there."""
    indices, values, lengths = [_NONE32], [np.empty(0)], [np.zeros(1, np.int64)]
    for numbers, rows, count in places:
        keys = _packed(numbers, rows, count, width)
        keys.sort()
        firsts = np.flatnonzero(is_new(keys))
        bits = keys.dtype.type(_bits(width))
        found = keys[firsts]
        indices.append((found & ((keys.dtype.type(1) << bits) - keys.dtype.type(1))).astype("i4"))
        values.append(np.diff(firsts, append=len(keys)).astype(np.float64))
        lengths.append(np.bincount((found >> bits).astype(np.int64), minlength=count))
    offsets = np.cumsum(np.concatenate(lengths))
    return Counts(np.concatenate(indices), np.concatenate(values), offsets)


_NONE32 = np.empty(0, np.int32)


def _bits(width: int) -> int:
    return max(1, (width - 1).bit_length())


def _packed(numbers: Any, rows: Any, count: int, width: int) -> Any:
    """Row and number in one word, as short as it can be: short ones are sorted faster."""
    kind = np.uint32 if count << _bits(width) <= 1 << 32 else np.uint64
    keys = rows.astype(kind) << kind(_bits(width))
    keys |= numbers.astype(kind)
    return keys


def _places(tokens: Tokens, learnt: Learnt, n: int) -> Iterator[tuple[Any, Any, int]]:
    if n == 1:
        table = numbers_of(tokens.terms, learnt["terms"])
        for part in slices(tokens, _CACHED):
            numbers = table[part.codes]
            known = np.flatnonzero(numbers >= 0)
            yield numbers[known], part.rows()[known], len(part.offsets) - 1
        return
    vocabulary, single = pa.array(learnt["hashes"]), hashes(tokens.terms)
    for part in slices(tokens, _SLICE):
        levels = list(hashed(part, single, n))
        numbers = numbers_of(pa.chunked_array([level for level, _ in levels]), vocabulary)
        known = np.flatnonzero(numbers >= 0)
        rows = np.concatenate([rows for _, rows in levels])
        yield numbers[known], rows[known], len(part.offsets) - 1
