"""Terms by their hashes alone: nothing is learnt, and no term is ever unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
from pydantic import Field, PositiveInt

from echelon.core.hashing import key, words
from echelon.data.prepare.columns import Columns, Sparse, Values
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.bag import Norm, normed
from echelon.data.prepare.text.base import Text
from echelon.data.prepare.text.grams import hashed, slices
from echelon.data.prepare.text.hashes import hashes
from echelon.data.prepare.text.numbers import Counts, gathered
from echelon.data.prepare.text.tokens import Tokens

_PLACE = key(0x9A5E)
_SLICE = 1 << 17


class HashedText(Text):
    """Kind `hashed_text`: how often a text has terms of each of `width` kinds."""

    width: Annotated[int, Field(ge=1, le=1 << 30)] = 1 << 18
    """Columns; terms share one by chance."""
    signed: bool = True
    """Half of the terms count negatively, so that what meets by chance cancels out."""
    ngrams: PositiveInt = 1
    """Terms are of 1 to this many tokens in a row."""
    norm: Norm = "l2"
    """What is made 1 in every row: the sum of its values, or of their squares."""

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        tokens = self.tokens(block, learnt)
        signs = 2 if self.signed else 1
        both = gathered(_places(tokens, self.ngrams, self.width * signs), self.width * signs)
        counts = _added(both, self.width) if self.signed else both
        values = normed(counts.values.copy(), counts, self.norm).astype(np.float32)
        return {self.name: Sparse(counts.indices, values, counts.offsets, self.width)}


def _places(tokens: Tokens, n: int, width: int) -> Iterator[tuple[Any, Any, int]]:
    single = hashes(tokens.terms)
    for part in slices(tokens, _SLICE):
        levels = list(hashed(part, single, n))
        numbers = words(np.concatenate([found for found, _ in levels]), _PLACE) % np.uint64(width)
        yield numbers, np.concatenate([rows for _, rows in levels]), len(part.offsets) - 1


def _added(both: Counts, width: int) -> Counts:
    """Columns 2i count up and 2i + 1 count down: here they become one."""
    rows, columns = both.rows(), both.indices >> 1
    signed = np.where(both.indices & 1, -both.values, both.values)
    if not len(rows):
        return both
    new = np.ones(len(rows), bool)
    new[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
    firsts = np.flatnonzero(new)
    sums = np.add.reduceat(signed, firsts)
    left = firsts[sums != 0]
    lengths = np.bincount(rows[left], minlength=len(both.offsets) - 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assert columns.max() < width
    return Counts(columns[left], sums[sums != 0], offsets)
