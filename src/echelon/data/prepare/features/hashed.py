"""Categories as numbers of a fixed number of buckets: nothing is learnt, however many there are."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.hashing import key, words
from echelon.data.prepare.columns import Columns, Sparse, Values
from echelon.data.prepare.features.categories import CategoryFeature
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.hashes import hashes

_TAG = 0xB0C4
_MISSING = key(_TAG, 0)
_NUMBER = key(_TAG, 1)

Buckets = Annotated[int, Field(ge=2, le=1 << 40)]


class Hashed(CategoryFeature):
    """The bucket of each category, int64 in [0, buckets), for an embedding; or sparse rows.

    Whatever is seen for the first time has its bucket; so have missing values. Equal categories of
    different sources have buckets of their own.
    """

    buckets: Buckets = 1 << 18
    form: Literal["numbers", "sparse"] = "numbers"
    """[N] or [N, sources] numbers; or rows of `buckets` columns that are how often each occurs."""
    seed: int = 0

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        found = [
            buckets(bits(column), self.buckets, key(_TAG, self.seed, at))
            for at, column in enumerate(self.columns(block))
        ]
        if self.form == "numbers":
            return {self.name: found[0] if len(found) == 1 else np.stack(found, 1)}
        return {self.name: _summed(np.stack(found, 1), self.buckets)}

    def different(self, learnt: Learnt) -> int | None:
        return self.buckets if self.form == "numbers" else None


def bits(column: Any) -> NDArray[np.uint64]:
    """64 bits for each category, the same in every block and run."""
    if column.type == pa.large_utf8():
        found = hashes(column.fill_null(""))
    else:
        # 0.0 and −0.0 are one number and two patterns of bits.
        numbers = column.fill_null(0).to_numpy(zero_copy_only=False) + 0
        found = words(np.ascontiguousarray(numbers).view(np.uint64), _NUMBER)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = _MISSING
    return found


def buckets(found: NDArray[np.uint64], count: int, salt: int) -> NDArray[np.int64]:
    """The bucket of each."""
    return (words(found, salt) % np.uint64(count)).view(np.int64)


def _summed(codes: NDArray[np.int64], width: int) -> Sparse:
    """Sparse rows that say how often each code occurs, in rising order."""
    ordered = np.sort(codes, 1)
    first = np.ones(ordered.shape, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    offsets = np.zeros(len(codes) + 1, np.int64)
    np.cumsum(first.sum(1), out=offsets[1:])
    # A row's first code is always one: so no run of equal codes goes on into the next row.
    starts = np.flatnonzero(first)
    values = np.diff(starts, append=first.size).astype(np.float32)
    return Sparse(ordered[first], values, offsets, width)
