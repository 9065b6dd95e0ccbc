"""Labels → numbers 0, 1, 2, … in the order of the labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.errors import DataError
from echelon.data.prepare.clean.missing import gaps
from echelon.data.prepare.columns import Columns, Values
from echelon.data.prepare.feature import MADE, Feature
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.step import mask

_CLASSES = "classes"
_NUMBERS = "numbers"
_SHOWN = 5


class Classes(Feature):
    """Whole numbers for the values of one column; a value that train does not have is refused."""

    most: int = 100_000
    """More different values than this are no classes."""

    passes: ClassVar[int] = 1

    def makes(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        self.check(names)
        return {self.name: pa.int64()}

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        super().check(names)
        if len(self.sources) != 1:
            raise DataError(f"feature classes: it is made of one column, not {len(self.sources)}")
        kind = names[self.sources[0]]
        plain = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind)
        if not (plain or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            what = "made by another feature" if kind == MADE else f"of type {kind}"
            raise DataError(
                f"feature classes: column {self.sources[0]!r} is {what}; labels are text or numbers"
            )

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        column: Any = block[self.sources[0]]
        found = column.unique()
        found = found.filter(pa.array(~gaps(found)))
        self._few(len(found))
        return {_CLASSES: found.cast(pa.large_utf8()), _NUMBERS: not _is_text(column)}

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        found: set[str] = set()
        numbers = True
        for partial in partials:
            found |= set(partial[_CLASSES].to_pylist())
            numbers = numbers and partial[_NUMBERS]
            self._few(len(found))
        ordered = sorted(found)
        if numbers:  # 2 comes before 10
            ordered.sort(key=_number)
        return {_CLASSES: ordered, _NUMBERS: numbers}

    def refused(self, block: Columns, learnt: Learnt) -> Mapping[int, str]:
        column: Any = block[self.sources[0]]
        unseen = mask(self._codes(column, learnt).is_null())
        rows = np.flatnonzero(unseen).tolist()
        labels = column.take(pa.array(rows, pa.int64()))
        return {
            row: self._absent() if absent else self._unseen(label, learnt)
            for row, label, absent in zip(rows, labels.to_pylist(), gaps(labels), strict=True)
        }

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        codes = self._codes(block[self.sources[0]], learnt)
        return {self.name: codes.to_numpy(zero_copy_only=False).astype(np.int64)}

    def _codes(self, column: Any, learnt: Learnt) -> Any:
        known = pa.array(learnt[_CLASSES], pa.large_utf8())
        return pc.index_in(column.cast(pa.large_utf8()), known, skip_nulls=True)

    def _few(self, count: int) -> None:
        if count > self.most:
            raise DataError(
                f"feature classes: column {self.sources[0]!r} has more than {self.most:,} "
                f"different values: it holds no classes"
            )

    def _absent(self) -> str:
        return f"column {self.sources[0]!r} has no value: it is the class"

    def _unseen(self, label: Any, learnt: Learnt) -> str:
        known = learnt[_CLASSES]
        some = ", ".join(known[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
        return f"class {label!r} of column {self.sources[0]!r} is not in train (there: {some})"


def _is_text(column: Any) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _number(label: str) -> float:
    return float(label == "true") if label in ("true", "false") else float(label)
