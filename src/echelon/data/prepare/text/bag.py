"""Texts as rows of a sparse matrix: which terms they have, how often, and what that is worth."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from echelon.data.prepare.columns import Columns, Sparse, Values
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.base import Chosen
from echelon.data.prepare.text.numbers import Counts, count_known

Norm = Literal["l1", "l2", "none"]


class _Sparse(Chosen):
    """One column for every term of the vocabulary."""

    ngrams: PositiveInt = 1
    """Terms are of 1 to this many tokens in a row."""

    @property
    def longest(self) -> int:
        return self.ngrams

    def values(self, counts: Counts, learnt: Learnt) -> NDArray[np.float64]:
        return counts.values

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        counts = count_known(self.tokens(block, learnt), learnt, self.longest)
        values = self.values(counts, learnt).astype(np.float32)
        return {self.name: Sparse(counts.indices, values, counts.offsets, len(learnt["hashes"]))}


class Bag(_Sparse):
    """Kind `bag`: how often a text has each term."""


class OneHotText(_Sparse):
    """Kind `one_hot_text`: 1 for every term that a text has."""

    def values(self, counts: Counts, learnt: Learnt) -> NDArray[np.float64]:
        return np.ones(len(counts.values))


class Tfidf(_Sparse):
    """Kind `tfidf`: counts, worth more the fewer texts have the term, as scikit-learn has it."""

    sublinear: bool = False
    """1 + log(count) in place of the count."""
    idf: bool = True
    """Whether rare terms are worth more."""
    smooth: bool = True
    """As if one text more had every term once."""
    norm: Norm = "l2"
    """What is made 1 in every row: the sum of its values, or of their squares."""

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        found = super().learn(at, partials, learnt, scratch)
        if at + 1 < self.looks:
            return found
        more = int(self.smooth)
        return {**found, "idf": np.log((found["texts"] + more) / (found["in_texts"] + more)) + 1.0}

    def values(self, counts: Counts, learnt: Learnt) -> NDArray[np.float64]:
        values = 1.0 + np.log(counts.values) if self.sublinear else counts.values.copy()
        if self.idf:
            values *= learnt["idf"][counts.indices]
        return normed(values, counts, self.norm)


def normed(values: NDArray[np.float64], counts: Counts, norm: Norm) -> NDArray[np.float64]:
    """The values of every row, divided by the row's norm."""
    if norm == "none":
        return values
    rows = counts.rows()
    sums = np.bincount(rows, values * values if norm == "l2" else np.abs(values))
    values /= (np.sqrt(sums) if norm == "l2" else np.where(sums > 0, sums, 1.0))[rows]
    return values
