"""How a lease is divided among those who work on it together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def edges(size: int, shares: Sequence[float]) -> list[int]:
    """Where the parts of `size` samples begin and end: one more number than there are parts.

    Parts differ from their shares by less than one sample, and equal shares are those of a shard.
    """
    ends = list(accumulate(shares))
    whole = ends[-1]
    return [0, *(int(size * end / whole) for end in ends[:-1]), size]


def counts(size: int, shares: Sequence[float]) -> list[int]:
    """How many of `size` samples each part has."""
    return [stop - start for start, stop in pairwise(edges(size, shares))]
