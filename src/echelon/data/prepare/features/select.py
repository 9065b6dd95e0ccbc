"""The columns that say most about what is to be predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.data.prepare.columns import Columns, Sparse, Values
from echelon.data.prepare.feature import Feature
from echelon.data.prepare.features import categories, sketch
from echelon.data.prepare.features.bins import bin_bounds, binned
from echelon.data.prepare.features.information import (
    contingency,
    information,
    presence,
    presence_information,
)
from echelon.data.prepare.features.numbers import matrix, named
from echelon.data.prepare.learnt import Learnt

Array = NDArray[Any]


class Select(Feature):
    """The `size` columns with the most mutual information with `label`, in their old order.

    Of a column of numbers it is that of its quantile bins (missing ones are a bin of their own),
    of a sparse column that of being there at all. As scikit-learn's mutual_info_classif of
    discrete features. Values stay as they are, float32; missing ones stay missing (NaN).
    """

    label: str
    """What is to be predicted."""
    of: Literal["class", "number"] = "class"
    """Whether the label is one of some classes, or a number that is put into bins too."""
    size: Annotated[int, Field(ge=1)]
    """How many columns are kept."""
    bins: Annotated[int, Field(ge=2, le=1024)] = 16

    passes: ClassVar[int] = 2

    def reads(self) -> list[str]:
        return [*self.sources, self.label]

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        named(self)

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        sparse = self._sparse(block)
        if at == 0:
            columns = [] if sparse else list(self._matrix(block).T)
            labels = self._labels(block)
            if self.of == "number":
                return {**sketch.partial([*columns, labels]), "sparse": sparse is not None}
            found = {**sketch.partial(columns), **categories.count([labels])}
            return {**found, "sparse": sparse is not None}
        codes, kinds = self._codes(block, learnt)
        there = codes >= 0
        if sparse:
            return presence(sparse, codes, kinds)
        bounds = sketch.apart(learnt["bounds"], learnt["sizes"])
        numbers = binned(self._matrix(block), bounds, self.bins)
        return {"table": contingency(numbers[there], codes[there], self.bins + 1, kinds)}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        if at == 0:
            return self._discretised(partials)
        whole: Learnt = {}
        for partial in partials:
            for name, values in partial.items():
                whole[name] = whole[name] + values if name in whole else values
        found = presence_information(**whole) if learnt["sparse"] else information(whole["table"])
        if self.size > len(found):
            raise DataError(f"feature {self.kind}: {self.size} of {len(found)} columns")
        # Of columns that say as much, the first.
        chosen = np.sort(np.argsort(-found, kind="stable")[: self.size])
        return {"information": found, "chosen": chosen}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        chosen, sparse = learnt["chosen"], self._sparse(block)
        if sparse is None:
            return {self.name: self._matrix(block)[:, chosen].astype(np.float32, order="C")}
        places = np.full(sparse.width, -1, np.int64)
        places[chosen] = np.arange(len(chosen))
        indices = places[sparse.indices]
        kept = indices >= 0
        offsets = np.concatenate([[0], kept.cumsum()])[sparse.offsets]
        values = sparse.values[kept].astype(np.float32)
        return {self.name: Sparse(indices[kept], values, offsets, len(chosen))}

    def _discretised(self, partials: Iterable[Learnt]) -> Learnt:
        """Bounds of all columns, and classes or bounds of the label."""
        columns, tally = sketch.Sketches(), categories.Tally(f"column {self.label!r}")
        sparse = False
        for partial in partials:
            columns.add(partial)
            sparse = partial["sparse"]
            if self.of == "class":
                tally.add(partial["values 0"], partial["counts 0"])
        found = columns.summaries()
        if not (tally.any() if self.of == "class" else found and len(found[-1].values)):
            raise DataError(f"feature {self.kind}: no record of train has a {self.label!r}")
        learnt: Learnt = {"sparse": sparse}
        if self.of == "class":
            learnt["classes"] = tally.chosen(1, None)
        else:
            learnt["label"] = _few_or_quantiles(found.pop(), self.bins)
        bounds = [_few_or_quantiles(summary, self.bins) for summary in found]
        learnt["bounds"] = np.concatenate([np.empty(0), *bounds])
        learnt["sizes"] = np.array([len(bound) for bound in bounds], np.int64)
        return learnt

    def _sparse(self, block: Columns) -> Sparse | None:
        first = block[self.sources[0]]
        return first if isinstance(first, Sparse) and len(self.sources) == 1 else None

    def _matrix(self, block: Columns) -> NDArray[np.float64]:
        return matrix(self.kind, block, self.sources)

    def _labels(self, block: Columns) -> Any:
        if self.of == "number":
            return matrix(self.kind, block, [self.label])[:, 0]
        (column,) = categories.labelled(self.kind, self.label, block[self.label])
        return column

    def _codes(self, block: Columns, learnt: Learnt) -> tuple[Array, int]:
        """The class or the bin of each label, −1 where it is missing; and how many there are."""
        labels = self._labels(block)
        if self.of == "number":
            return binned(labels[:, None], [learnt["label"]], -1)[:, 0], self.bins
        known = {"categories 0": learnt["classes"], "missing": np.array([False])}
        return categories.encode([labels], known)[0], len(learnt["classes"])


def _few_or_quantiles(summary: sketch.Summary, bins: int) -> NDArray[np.float64]:
    """A bin for each value if they are few, else quantiles: a rare value is not lost in a bin."""
    if len(summary.values) <= bins:
        return summary.values[1:]
    return bin_bounds(summary, bins)
