"""Random 64-bit words that are pure functions of their names.

The order of an epoch, the random numbers of a sample and the first values of embedding rows come
from here: any process computes the same word, in any order, without state.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ / golden ratio: steps through all 64-bit words evenly
_FIRST = 0xBF58476D1CE4E5B9  # the two multipliers of splitmix64's finalizer
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1

# Operands as 0-d arrays: numpy takes twice as long to convert a scalar on every call.
_STEP = np.array(_GOLDEN, np.uint64)
_MULTIPLIERS = (np.array(_FIRST, np.uint64), np.array(_SECOND, np.uint64))
_SHIFTS = tuple(np.array(bits, np.uint64) for bits in (30, 27, 31))


def key(*names: int) -> int:
    """Return one 64-bit word for a sequence of integers of any size and sign."""
    state = len(names)
    for name in names:
        while True:
            state = _finish((state ^ (name & _MASK)) + _GOLDEN)
            name >>= 64
            if name in (0, -1):
                break
        state = _finish(state + (name & 1))
    return state


def keys(count: int, *names: int) -> Words:
    """Return `count` words that are practically independent of each other."""
    return words(np.arange(count, dtype=np.uint64), key(*names))


def words(numbers: Words, key: int) -> Words:
    """Return a word for each number. Distinct numbers get distinct words (splitmix64 is 1:1)."""
    mixed = numbers * _STEP
    mixed += np.array(key, np.uint64)
    shifted = np.empty_like(mixed)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        np.right_shift(mixed, shift, out=shifted)
        mixed ^= shifted
        mixed *= multiplier
    np.right_shift(mixed, _SHIFTS[-1], out=shifted)
    mixed ^= shifted
    return mixed


def _finish(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)
