"""Values that are missing: records go, or something stands in for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import model_validator

from echelon.core.config.sections import SettingError
from echelon.core.errors import DataError
from echelon.data.prepare.clean.median import Median
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.step import (
    Cleaned,
    ColumnStep,
    is_number,
    is_text,
    mask,
    replaced,
    without,
)

SUFFIX = "_missing"
"""What an indicator's name ends in."""


class Missing(ColumnStep):
    """What becomes of records without a value: a null, NaN, or a text with nothing in it.

    Numbers that a mean, a median or a fraction stands in for become float64.
    """

    kind: Literal["missing"] = "missing"
    how: Literal["drop", "constant", "mean", "median"] = "drop"
    value: bool | int | float | str | None = None
    """What stands in, with how: constant."""
    indicator: bool = False
    """Add a column `<column>_missing` that says where a value was missing."""

    types: ClassVar[str] = "numbers, for a mean or a median"
    passes: ClassVar[int] = 1

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if (self.how == "constant") != (self.value is not None):
            word = "needs a" if self.how == "constant" else "takes no"
            raise SettingError(f"step missing: how: {self.how} {word} value", "value", "how")
        if self.indicator and self.how == "drop":
            raise SettingError(
                "step missing: an indicator of records that are dropped says nothing",
                "indicator",
                "how",
            )
        return self

    @property
    def looks(self) -> int:
        return int(self.how in ("mean", "median"))

    def adds(self) -> dict[str, str]:
        return {name + SUFFIX: name for name in self.columns} if self.indicator else {}

    def fits(self, kind: pa.DataType) -> bool:
        return is_number(kind) or not self.looks

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        for name in self.columns:
            if self.how == "constant":
                self._constant(name, names[name])
            if self.how != "drop":
                after[name] = self._filled(names[name])
            if self.indicator:
                if name + SUFFIX in names:
                    raise DataError(f"step missing: there is a column {name + SUFFIX!r} already")
                after[name + SUFFIX] = pa.bool_()
        return after

    def look(self, at: int, block: pa.RecordBatch, learnt: Learnt) -> Learnt:
        found: Learnt = {}
        for name in self.columns:
            values = _present(block.column(name))
            found[name] = values if self.how == "median" else np.array([values.sum(), len(values)])
        return found

    def learn(
        self,
        at: int,
        partials: Iterable[Learnt],
        learnt: Learnt,
        scratch: Path,
    ) -> Learnt:
        if self.how == "median":
            found = _medians(self.columns, partials, scratch)
        else:
            found = _means(self.columns, partials)
        for name, value in found.items():
            if value is None:
                raise DataError(
                    f"step missing: column {name!r} has no value to take a {self.how} of"
                )
        return dict(found)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        if self.how == "drop":
            reasons: dict[int, str] = {}
            for name in self.columns:
                for row in np.flatnonzero(gaps(block.column(name))).tolist():
                    reasons.setdefault(row, f"{name!r} is missing")
            return without(block, reasons)
        filled = 0
        for name in self.columns:
            column = block.column(name)
            gone = gaps(column)
            filled += int(gone.sum())
            if self.looks:
                value = pa.scalar(learnt[name], pa.float64())
            else:
                value = self._constant(name, column.type)
            if value.type != column.type:
                column = _floats(column)
            block = replaced(block, name, pc.if_else(pa.array(gone), value, column))
            if self.indicator:
                block = replaced(block, name + SUFFIX, pa.array(gone))
        return Cleaned(block, counts={"filled": filled})

    def _filled(self, kind: pa.DataType) -> pa.DataType:
        """The type of a column after it: whole numbers have no room for a fraction."""
        fraction = isinstance(self.value, float) and self.value % 1 > 0
        return pa.float64() if self.looks or (fraction and pa.types.is_integer(kind)) else kind

    def _constant(self, name: str, kind: pa.DataType) -> Any:
        """The value as one of the column's own; Arrow would cut some, and make others infinite."""
        filled = self._filled(kind)
        try:
            value = pa.scalar(self.value, filled)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError):
            value = None
        if value is None or (isinstance(self.value, float) and not _same(self.value, value)):
            raise DataError(
                f"step missing: value {self.value!r} is not of type {kind}, as column {name!r} is"
            )
        return value


def _same(number: float, value: Any) -> bool:
    """Whether it is still that number, as near as its type has one."""
    return is_number(value.type) and math.isinf(value.as_py()) == math.isinf(number)


def gaps(column: Any) -> NDArray[np.bool_]:
    """Where a value is missing."""
    gone = mask(pc.is_null(column, nan_is_null=True))
    if is_text(column.type):
        gone |= mask(pc.equal(pc.binary_length(column), 0))
    return gone


def _floats(column: Any) -> Any:
    """The nearest ones: not every whole number beyond 2^53 is one."""
    return column.cast(pa.float64(), safe=False)


def _present(column: Any) -> NDArray[np.float64]:
    values: NDArray[np.float64] = _floats(column).drop_null().to_numpy()
    return values[~np.isnan(values)]


def _means(names: Iterable[str], partials: Iterable[Learnt]) -> dict[str, float | None]:
    totals = {name: np.zeros(2) for name in names}
    for partial in partials:
        for name, total in totals.items():
            total += partial[name]
    return {name: float(s / n) if n else None for name, (s, n) in totals.items()}


def _medians(
    names: Iterable[str], partials: Iterable[Learnt], scratch: Path
) -> dict[str, float | None]:
    medians = {name: Median(scratch / f"median-{at}") for at, name in enumerate(names)}
    for partial in partials:
        for name, median in medians.items():
            median.add(partial[name])
    return {name: median.value() for name, median in medians.items()}
