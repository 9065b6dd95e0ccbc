"""Numbers that are out of range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.step import Cleaned, ColumnStep, is_number, mask, replaced, without


class Range(ColumnStep):
    """Limits on numbers; what is missing is within every range."""

    kind: Literal["range"] = "range"
    min: float | None = None
    max: float | None = None
    how: Literal["drop", "clip", "missing"] = "drop"

    types: ClassVar[str] = "numbers"

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.min is None and self.max is None:
            raise SettingError("step range: set min, max or both", "min", "max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise SettingError(f"step range: min {self.min} is above max {self.max}", "min", "max")
        return self

    def fits(self, kind: pa.DataType) -> bool:
        return is_number(kind)

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        for name in self.columns:
            if self.how == "clip" and pa.types.is_integer(names[name]):
                self._check_limits(name, names[name])
        return after

    def _check_limits(self, name: str, kind: pa.DataType) -> None:
        """Nothing can be moved to a limit that the type has no number for."""
        known = np.iinfo(kind.to_pandas_dtype())
        for word, limit, beyond in (
            ("min", self.min, self.min is not None and self.min > known.max),
            ("max", self.max, self.max is not None and self.max < known.min),
        ):
            if beyond:
                raise DataError(
                    f"step range: {word} = {limit:g}: column {name!r} is of type {kind}, from "
                    f"{known.min} to {known.max}; change it first with a step types"
                )

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        reasons: dict[int, str] = {}
        changed = 0
        for name in self.columns:
            column = block.column(name)
            for gone, limit, word in self._outside(column):
                if self.how == "drop":
                    for row in np.flatnonzero(gone).tolist():
                        told = f"{name!r} is {column[row].as_py()}: {word} {limit:g}"
                        reasons.setdefault(row, told)
                elif gone.any():
                    changed += int(gone.sum())
                    value = self._stand_in(column.type, limit, word)
                    column = pc.if_else(pa.array(gone), value, column)
                    block = replaced(block, name, column)
        return without(block, reasons, changed=changed)

    def _outside(self, column: Any) -> Iterator[tuple[NDArray[np.bool_], float, str]]:
        """Which values are beyond which limit."""
        wide = column.cast(pa.float64(), safe=False)
        if self.min is not None:
            yield mask(pc.less(wide, self.min)), self.min, "below"
        if self.max is not None:
            yield mask(pc.greater(wide, self.max)), self.max, "above"

    def _stand_in(self, kind: pa.DataType, limit: float, word: str) -> Any:
        if self.how == "missing":
            return pa.scalar(None, kind)
        if pa.types.is_integer(kind):
            limit = math.ceil(limit) if word == "below" else math.floor(limit)
        return pa.scalar(limit, kind)
