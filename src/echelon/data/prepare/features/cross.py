"""Several categories as one: each combination is a category of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.errors import DataError
from echelon.core.hashing import key
from echelon.data.prepare.columns import Columns, Values
from echelon.data.prepare.features.categories import CategoryFeature
from echelon.data.prepare.features.hashed import Buckets, bits, buckets
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.text.hashes import joined

SEPARATOR = pa.scalar(" × ", pa.large_utf8())
_TAG = 0xC505


class Cross(CategoryFeature):
    """Combinations of two or more columns.

    With `buckets`, the bucket of each (int64), where a missing value is as good as any other.
    Without, a string such as `Male × Sales` for one_hot, target or hashed; it is missing where one
    of its parts is.
    """

    buckets: Buckets | None = None
    seed: int = 0

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        if len(self.sources) < 2:
            raise DataError(f"feature {self.kind}: {self.sources[0]} alone: name two or more")

    def makes(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        return super().makes(names) if self.buckets else {self.name: pa.large_utf8()}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        columns = self.columns(block)
        if self.buckets is None:
            texts = [column.cast(pa.large_utf8()) for column in columns]
            return {self.name: pc.binary_join_element_wise(*texts, SEPARATOR)}
        together = reduce(joined, (bits(column) for column in columns))
        return {self.name: buckets(together, self.buckets, key(_TAG, self.seed))}

    def different(self, learnt: Learnt) -> int | None:
        return self.buckets
