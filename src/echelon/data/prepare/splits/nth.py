"""The n-th smallest of very many numbers, exactly, without sorting or holding them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.splits.part import Keys

Words = NDArray[np.uint64]
_BITS = 16
_TOP = np.uint64(1 << 63)


def sortable(numbers: Keys) -> Words:
    """Words in the same order as the numbers."""
    if numbers.dtype.kind == "u":
        return numbers.astype(np.uint64)
    if numbers.dtype.kind != "f":
        return numbers.astype(np.int64).view(np.uint64) ^ _TOP
    # + 0.0 makes one zero of two. Greater floats have greater bits, but negative ones the reverse.
    bits = (numbers.astype(np.float64) + 0.0).view(np.uint64)
    return np.where(bits & _TOP, ~bits, bits | _TOP)


def smallest(words: Callable[[], Iterable[Words]], ranks: Sequence[int]) -> Words:
    """Those of these ranks, from 0; goes through the words four times, 16 bits at a time."""
    found = np.zeros(len(ranks), np.uint64)
    left = list(ranks)
    for shift in range(64 - _BITS, -1, -_BITS):
        counts = np.zeros((len(ranks), 1 << _BITS), np.int64)
        for part in words():
            digits = part >> np.uint64(shift)
            for at, known in enumerate(found):
                same = digits[digits >> np.uint64(_BITS) == known]
                low = (same & np.uint64((1 << _BITS) - 1)).astype(np.int64)
                counts[at] += np.bincount(low, minlength=1 << _BITS)
        for at, ends in enumerate(counts.cumsum(1)):
            digit = int(np.searchsorted(ends, left[at], "right"))
            left[at] -= int(ends[digit - 1]) if digit else 0
            found[at] = found[at] << np.uint64(_BITS) | np.uint64(digit)
    return found
