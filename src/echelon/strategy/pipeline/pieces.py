"""A batch in micro-batches."""

from __future__ import annotations

from itertools import pairwise

from echelon.core.types import Batch
from echelon.data import batch as batches

PER_MEMBER = 4
"""Micro-batches for each member, unless the job says how many: a fifth of the time is lost while
the pipeline fills and empties."""
_SMALLEST = 2
"""Samples: batch norm needs two."""
_UNKNOWN = 32
"""Samples of a micro-batch where nobody says how many."""


def how_many(size: int, members: int, wanted: int | None) -> int:
    """As many as wanted, if there are as many samples."""
    if wanted is None:
        wanted = 1 if members == 1 else min(PER_MEMBER * members, size // _SMALLEST)
    return max(1, min(wanted, size))


def usual(
    batch: int | None, replicas: int, accumulate: int, members: int, wanted: int | None
) -> int:
    """Samples of a micro-batch, at least as many as batch norm needs."""
    if batch is None:
        return _UNKNOWN
    share = batch // (replicas * accumulate)
    return max(_SMALLEST, share // how_many(share, members, wanted))


def pieces(batch: Batch, count: int) -> list[Batch]:
    """Sizes differ by one sample at most."""
    if count == 1:
        return [batch]
    size = batches.size(batch)
    edges = [size * at // count for at in range(count + 1)]
    return batches.split(batch, [stop - start for start, stop in pairwise(edges)])
