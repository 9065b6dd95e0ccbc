"""Labels that look wrong: those a model disagrees with that has not seen the record.

Records fall into folds by their text, so those alike are never on both sides. For every fold a
linear model over hashed words is trained on a sample of the others, and says of each record of
its own fold what its label should be. Nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field

from echelon.core.errors import DataError
from echelon.data.prepare.clean.bag import bagged
from echelon.data.prepare.clean.fingerprint import fingerprints
from echelon.data.prepare.clean.judges import FOLDS, SAMPLE, Sample, judged
from echelon.data.prepare.clean.missing import gaps
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.step import Cleaned, Step, is_text


class Noise(Step):
    """A report of labels that are probably wrong, by what a model makes of the text."""

    kind: Literal["noise"] = "noise"
    label: str
    column: str
    """The text to tell the label by."""
    sure: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """How likely the model must find another label before a record is noted."""

    @property
    def looks(self) -> int:
        return 1

    def reads(self) -> list[str]:
        return [self.label, self.column]

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        if not is_text(names[self.column]):
            raise DataError(f"step noise: column {self.column!r} must be text to tell labels by")
        if pa.types.is_floating(names[self.label]):
            raise DataError(f"step noise: column {self.label!r} has numbers, not classes")
        return after

    def look(self, at: int, block: pa.RecordBatch, learnt: Learnt) -> Learnt:
        rows, order = self._known(block)
        rows = rows[np.argsort(order[rows], kind="stable")[:SAMPLE]]
        chosen = block.take(pa.array(np.sort(rows)))
        bag = bagged(chosen.column(self.column))
        return {
            "labels": _labels(chosen.column(self.label)),
            "order": order[np.sort(rows)],
            "buckets": bag.buckets,
            "offsets": bag.offsets,
        }

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        sample = Sample()
        for partial in partials:
            sample.add(partial)
        return sample.models(self.sure)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        if not learnt["classes"]:
            return Cleaned(block)
        rows, order = self._known(block)
        classes = np.array(learnt["classes"], object)
        labels = np.array(_labels(block.column(self.label)).fill_null("").to_pylist(), object)[rows]
        bag = bagged(block.column(self.column).take(pa.array(rows)))
        likely = judged(bag, order[rows] % np.uint64(FOLDS), learnt["weights"], learnt["bias"])
        best = likely.argmax(1)
        sure = likely[np.arange(len(rows)), best]
        other = np.isin(labels, classes) & (classes[best] != labels) & (sure >= self.sure)
        noted = [
            (
                int(rows[at]),
                f"label {labels[at]!r}, but by its text {classes[best[at]]!r} ({sure[at]:.2f})",
            )
            for at in np.flatnonzero(other).tolist()
        ]
        return Cleaned(block, counts={"suspected": len(noted)}, noted=noted)

    def _known(self, block: pa.RecordBatch) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Rows with a text and a label, and for all rows a number that their text alone gives."""
        text = block.column(self.column)
        gone = gaps(text) | gaps(block.column(self.label))
        return np.flatnonzero(~gone), fingerprints([text])[:, 0]


def _labels(column: Any) -> Any:
    """Classes by their names, whatever their type."""
    return column if pa.types.is_large_string(column.type) else column.cast(pa.large_utf8())
