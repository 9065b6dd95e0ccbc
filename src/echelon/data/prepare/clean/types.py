"""Columns of one type as columns of another: what does not fit is dropped, or missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.parse.fit import fit
from echelon.data.prepare.parse.types import arrow_type
from echelon.data.prepare.step import Cleaned, ColumnStep, is_text, replaced, without


class Types(ColumnStep):
    """Change the type of columns. Texts are trimmed first, and an empty one is missing."""

    kind: Literal["types"] = "types"
    to: str
    how: Literal["drop", "missing"] = "drop"

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        kind = arrow_type("step types: to", self.to)
        return super().check(names) | dict.fromkeys(self.columns, kind)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        kind = arrow_type("step types: to", self.to)
        reasons: dict[int, str] = {}
        emptied = 0
        for name in self.columns:
            column = block.column(name)
            if is_text(column.type) and not is_text(kind):
                column = pc.utf8_trim_whitespace(column)
                empty = pc.equal(pc.binary_length(column), 0)
                column = pc.if_else(empty, pa.scalar(None, column.type), column)
            fitted, wrong = fit(column, kind)
            if self.how == "drop":
                for row in np.flatnonzero(wrong).tolist():
                    told = f"{name!r} is {column[row].as_py()!r}: not of type {self.to}"
                    reasons.setdefault(row, told)
            emptied += int(wrong.sum())
            block = replaced(block, name, fitted)
        return without(block, reasons, emptied=emptied if self.how == "missing" else 0)
