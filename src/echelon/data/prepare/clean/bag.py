"""Texts as rows of hashed words, for a quick model of any language."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.core.hashing import key, words
from echelon.data.prepare.clean.minhash import characters
from echelon.data.prepare.text.hashes import hashes
from echelon.data.prepare.text.tokenise import tokenise

BUCKETS = 1 << 16
_PAIR = key(0xBA6)
_IDEOGRAPHS = 0x2E80
"""From here on words are not parted by blanks: pairs of characters stand for them."""


class Bag(NamedTuple):
    """Row i has the buckets `buckets[offsets[i]:offsets[i + 1]]`, as often as they occur."""

    buckets: NDArray[np.int32]
    offsets: NDArray[np.int64]


def bagged(text: Any) -> Bag:
    """The words of a column of text, and its pairs of ideographs."""
    tokens = tokenise(text, "words")
    found, rows = hashes(tokens.terms)[tokens.codes], tokens.rows().astype(np.int64)
    points, of = characters(text.fill_null("").to_pylist())
    pair = np.flatnonzero((points[:-1] >= _IDEOGRAPHS) & (points[1:] >= _IDEOGRAPHS))
    if len(pair):
        both = points[pair].astype(np.uint64) << np.uint64(32) | points[pair + 1]
        found = np.concatenate([found, words(both, _PAIR)])
        rows = np.concatenate([rows, of[pair]])
        order = np.argsort(rows, kind="stable")
        found, rows = found[order], rows[order]
    offsets = np.searchsorted(rows, np.arange(len(text) + 1))
    return Bag((found % np.uint64(BUCKETS)).astype(np.int32), offsets)


def joined(rows: list[NDArray[np.int32]]) -> Bag:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return Bag(np.concatenate(rows) if rows else np.zeros(0, np.int32), offsets)


def matrix(bag: Bag, width: int) -> Any:
    """A sparse matrix with rows of length one; `width` is a power of two, at most BUCKETS."""
    from scipy.sparse import csr_array

    count = len(bag.offsets) - 1
    # scikit-learn takes no offsets of 64 bits.
    parts = np.ones(len(bag.buckets), np.float32), bag.buckets & (width - 1)
    rows = csr_array((*parts, bag.offsets.astype(np.int32)), (count, width))
    rows.sum_duplicates()
    # With the root of how often a word occurs, the squares of a row add up to its words.
    words = np.repeat(np.diff(bag.offsets), np.diff(rows.indptr))
    rows.data = np.sqrt(rows.data / words, dtype=np.float32)
    return rows
