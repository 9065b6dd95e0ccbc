"""64 bits for a term, the same in every block and process."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.core.hashing import key, words

Hashes = NDArray[np.uint64]

_STRING, _LEFT, _JOINED = (key(0x7E47, part) for part in range(3))
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


def hashes(terms: Any) -> Hashes:
    """Of an Arrow array of large strings without nulls, eight bytes of each at a time."""
    count = len(terms)
    _, places, buffer = terms.buffers()
    offsets = np.frombuffer(places, np.int64, count + 1, terms.offset * 8)
    padded = (buffer.to_pybytes() if buffer else b"") + bytes(8)
    eights = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))
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
    """Of a term and a token behind it; (a, b) and (b, a) differ."""
    return words(words(left, _LEFT) ^ right, _JOINED)
