"""How often every term of a block occurs, and in how many of its texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare.text.flat import Whole
from echelon.data.prepare.text.grams import places, slices
from echelon.data.prepare.text.hashes import Hashes, hashes, joined
from echelon.data.prepare.text.records import Records, is_new, merged, record_type
from echelon.data.prepare.text.tokens import Tokens

_SLICE = 1 << 20
"""Tokens whose places are in memory at one time."""
_CACHED = 1 << 17
"""Tokens that are sorted at one time."""


class Groups(NamedTuple):
    """The class of each text, as a number below `classes`."""

    of_text: Whole
    classes: int


class _Terms(NamedTuple):
    """Different terms of the same number of tokens."""

    hashes: Hashes
    parts: NDArray[np.uint64]
    """The hashes of their tokens [terms, n]; 0 behind the last one."""


def count_terms(tokens: Tokens, n: int, groups: Groups | None = None) -> Records:
    """Every term of 1 … n tokens (in each class), in the order of the hashes."""
    single = hashes(tokens.terms)
    found, row = [np.empty(0, record_type(n, grouped=groups is not None))], 0
    for part in slices(tokens, _SLICE):
        count = len(part.offsets) - 1
        found.extend(_counted(part, single, n, _some(groups, row, count)))
        row += count
    return merged(found)


def _some(groups: Groups | None, low: int, count: int) -> Groups | None:
    return groups and Groups(groups.of_text[low : low + count], groups.classes)


def _counted(tokens: Tokens, single: Hashes, n: int, groups: Groups | None) -> Iterator[Records]:
    """Records of this slice, order by order.

    A term is (the number of the term without its last token) × (number of tokens) + that token:
    so it is one whole number, and counting is sorting.
    """
    codes, count = tokens.codes.astype(np.int64), len(single)
    at, keys, shorter = places(tokens), codes, _alone(single, n)
    yield _records(keys, count, at.rows, groups, lambda found: _take(shorter, found))
    for order in range(2, n + 1):
        on, at = at.longer()
        base = shorter

        def terms(found: Whole, base: _Terms = base, order: int = order) -> _Terms:
            return _longer(base, found // count, single[found % count], order)

        keys = keys[on] * count + codes[at.last]
        yield _records(keys, len(base.hashes) * count, at.rows, groups, terms)
        if order < n:
            coded = pa.array(keys).dictionary_encode()
            keys = coded.indices.to_numpy().astype(np.int64)
            shorter = terms(coded.dictionary.to_numpy())


def _alone(single: Hashes, n: int) -> _Terms:
    parts = np.zeros((len(single), n), np.uint64)
    parts[:, 0] = single
    return _Terms(single, parts)


def _take(terms: _Terms, chosen: Whole) -> _Terms:
    return _Terms(terms.hashes[chosen], terms.parts[chosen])


def _longer(shorter: _Terms, chosen: Whole, last: Hashes, order: int) -> _Terms:
    terms = _take(shorter, chosen)
    terms.parts[:, order - 1] = last
    return _Terms(joined(terms.hashes, last), terms.parts)


def _records(
    keys: Whole, width: int, rows: NDArray[Any], groups: Groups | None, terms: Any
) -> Records:
    if groups is not None:
        keys, width = keys * groups.classes + groups.of_text[rows], width * groups.classes
    found, counts = _tally(keys, width)
    _, texts = _tally(_once(keys, width, rows), width)
    which = terms(found if groups is None else found // groups.classes)
    n = which.parts.shape[1]
    out = np.empty(len(found), record_type(n, grouped=groups is not None))
    out["hash"], out["count"], out["texts"] = which.hashes, counts, texts
    if groups is not None:
        out["group"] = found % groups.classes
    if n > 1:
        out["tokens"] = which.parts
    return out


def _tally(keys: Whole, width: int) -> tuple[Whole, Whole]:
    """The different keys, smallest first, and how often each is there."""
    if width <= 4 * len(keys):
        counts = np.bincount(keys, minlength=width)
        found = np.flatnonzero(counts)
        return found, counts[found]
    ordered = np.sort(keys)
    firsts = np.flatnonzero(is_new(ordered))
    return ordered[firsts], np.diff(firsts, append=len(ordered))


def _once(keys: Whole, width: int, rows: NDArray[Any]) -> Whole:
    """The keys again, each once per text."""
    bits = max(1, (width - 1).bit_length())
    kept, start = [np.empty(0, np.int64)], 0
    while start < len(keys):
        first = int(rows[start])
        # Whole texts, as many as stay in the cache, and as their numbers have bits for.
        last = int(rows[min(start + _CACHED, len(keys)) - 1])
        last = min(max(first, last - 1), first + (1 << 62 - bits) - 1)
        stop = int(np.searchsorted(rows, rows.dtype.type(last), "right"))
        small = (last - first + 1) << bits <= 1 << 32
        both: Any = keys[start:stop].astype(np.uint32 if small else np.uint64)
        both |= (rows[start:stop] - first).astype(both.dtype) << both.dtype.type(bits)
        both.sort()
        kept.append((both[is_new(both)] & both.dtype.type((1 << bits) - 1)).astype(np.int64))
        start = stop
    return np.concatenate(kept)
