"""Texts and lists that are too short or too long."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, model_validator

from echelon.core.config.sections import SettingError
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.step import Cleaned, ColumnStep, is_text, replaced, without


class Length(ColumnStep):
    """Limits on the length of a text or a list; what is missing has none."""

    kind: Literal["length"] = "length"
    min: Annotated[int, Field(ge=0)] | None = None
    max: Annotated[int, Field(ge=1)] | None = None
    too_long: Literal["drop", "cut"] = "drop"

    types: ClassVar[str] = "text or a list"

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.min is None and self.max is None:
            raise SettingError("step length: set min, max or both", "min", "max")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise SettingError(f"step length: min {self.min} is above max {self.max}", "min", "max")
        return self

    def fits(self, kind: pa.DataType) -> bool:
        return is_text(kind) or _is_list(kind)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        reasons: dict[int, str] = {}
        cut = 0
        for name in self.columns:
            column = block.column(name)
            lengths = _lengths(column)
            if self.min is not None:
                self._note(reasons, name, lengths, lengths < self.min, f"fewer than {self.min}")
            if self.max is not None:
                long = lengths > self.max
                if self.too_long == "drop":
                    self._note(reasons, name, lengths, long, f"more than {self.max}")
                elif long.any():
                    cut += int(long.sum())
                    block = replaced(block, name, _cut(column, self.max))
        return without(block, reasons, cut=cut)

    def _note(
        self,
        reasons: dict[int, str],
        name: str,
        lengths: NDArray[np.int64],
        gone: NDArray[np.bool_],
        what: str,
    ) -> None:
        for row in np.flatnonzero(gone & (lengths >= 0)).tolist():
            reasons.setdefault(row, f"{name!r} has a length of {lengths[row]}: {what}")


def _lengths(column: Any) -> NDArray[np.int64]:
    """In characters or items; −1 where the value is missing."""
    text = is_text(column.type)
    lengths = pc.utf8_length(column) if text else pc.list_value_length(column)
    return np.asarray(lengths.fill_null(-1).to_numpy(zero_copy_only=False), np.int64)


def _cut(column: Any, most: int) -> Any:
    if is_text(column.type):
        return pc.utf8_slice_codeunits(column, 0, most)
    return pc.list_slice(column, 0, most, return_fixed_size_list=False).cast(column.type)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
