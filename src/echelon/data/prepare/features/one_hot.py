"""A column for each category, with a 1 in the one that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.data.prepare.columns import Columns, Sparse, Values
from echelon.data.prepare.features.categories import (
    UNSEEN,
    CategoryFeature,
    Codes,
    count,
    encode,
    learn_categories,
    sizes,
)
from echelon.data.prepare.learnt import Learnt

DENSE = 64
"""Up to this many columns the result is dense, where the recipe does not say."""


class OneHot(CategoryFeature):
    """0 and 1, float32, for the sorted categories of train, one source after the other.

    As scikit-learn's OneHotEncoder: a missing value is a category of its own if train has any,
    and a category that train has not is 0 everywhere.
    """

    at_least: Annotated[int, Field(ge=1)] = 1
    """Categories that train has less often are as if it had them not."""
    size: Annotated[int, Field(ge=1)] | None = None
    """Of each source only so many categories, the most frequent ones."""
    form: Literal["auto", "dense", "sparse"] = "auto"
    """Rows of all columns, or of those that are 1 alone; by the number of columns if not said."""
    unseen: Literal["zeros", "refuse"] = "zeros"
    """What becomes of a record with a category that train has not."""

    passes: ClassVar[int] = 1
    by_category: ClassVar[bool] = True

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        return count(self.columns(block))

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        found = learn_categories(self.sources, partials, self.at_least, self.size)
        if not sum(sizes(found)):
            names = ", ".join(self.sources)
            raise DataError(f"feature {self.kind}: {names}: train has no category")
        return found

    def refused(self, block: Columns, learnt: Learnt) -> Mapping[int, str]:
        if self.unseen == "zeros":
            return {}
        columns = self.columns(block)
        return {
            int(row): f"feature {self.name}: category {column[int(row)].as_py()!r} is not in train"
            for column, codes in zip(columns, encode(columns, learnt), strict=True)
            for row in np.flatnonzero(codes == UNSEEN)
        }

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        codes, width = self._codes(block, learnt)
        dense = width <= DENSE if self.form == "auto" else self.form == "dense"
        return {self.name: spread(codes, width) if dense else listed(codes, width)}

    def _codes(self, block: Columns, learnt: Learnt) -> tuple[Codes, int]:
        """[N, sources]: which column of the result is 1, or UNSEEN."""
        ends = np.cumsum(sizes(learnt))
        columns = encode(self.columns(block), learnt)
        out = np.empty((len(columns[0]), len(columns)), np.int32)
        for at, (codes, start) in enumerate(zip(columns, [0, *ends[:-1].tolist()], strict=True)):
            np.add(codes, np.int32(start), out=out[:, at])
            if start and codes.min(initial=0) == UNSEEN:
                out[codes == UNSEEN, at] = UNSEEN
        return out, int(ends[-1])


def spread(codes: Codes, width: int) -> NDArray[np.float32]:
    """Dense rows with a 1 at each code that is not UNSEEN."""
    out = np.zeros((len(codes), width), np.float32)
    flat, starts = out.reshape(-1), np.arange(len(codes)) * width
    for column in codes.T:
        places = starts + column
        there = column != UNSEEN
        flat[places if there.all() else places[there]] = 1
    return out


def listed(codes: Codes, width: int) -> Sparse:
    """The same as sparse rows; each has its codes in rising order."""
    count, each = codes.shape
    indices, offsets = codes.reshape(-1), np.arange(0, codes.size + 1, each)
    if codes.min(initial=0) == UNSEEN:
        there = codes != UNSEEN
        indices, offsets = codes[there], np.zeros(count + 1, np.int64)
        np.cumsum(there.sum(1), out=offsets[1:])
    return Sparse(indices, np.ones(len(indices), np.float32), offsets, width)
