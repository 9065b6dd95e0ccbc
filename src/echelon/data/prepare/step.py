"""What every kind of cleaning step has in common: a block in, the rows that stay out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import model_validator

from echelon.core.config.sections import Section, SettingError
from echelon.core.errors import DataError, unknown
from echelon.data.prepare.learnt import Learnt


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a step made of a block. Rows of it are those given, less those dropped, in order."""

    block: pa.RecordBatch
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """Row in the block that was given, and why it is gone."""
    counts: dict[str, int] = field(default_factory=dict)
    """What else was done, and to how many rows."""
    noted: list[tuple[int, str]] = field(default_factory=list)
    """Rows that stay and are worth a look, and why."""


class Step(Section):
    """One row of a recipe's `clean`. A kind is one class and one row of the registry."""

    kind: str

    passes: ClassVar[int] = 0
    """How often any step of this kind has to look at all rows: see `looks`."""

    @property
    def looks(self) -> int:
        """How often this one has to look at all rows before it can clean, as its settings are."""
        return self.passes

    def reads(self) -> list[str]:
        """The columns it wants to see."""
        return []

    def adds(self) -> dict[str, str]:
        """Columns that are new after it, and which column each is made of."""
        return {}

    def apart_from(self, names: Collection[str]) -> Self | None:
        """What it does to records that have no such columns; nothing, if it cannot do without."""
        return None if {*self.reads()} & {*names} else self

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        """The columns there are after it; refuses what it cannot work on, before any work."""
        for name in self.reads():
            if name not in names:
                raise DataError(f"step {self.kind}: {unknown('column', name, names)}")
        return dict(names)

    def look(self, at: int, block: pa.RecordBatch, learnt: Learnt) -> Learnt:
        """Pass `at` over the rows that the steps before have left, in a worker."""
        raise AssertionError(self.kind, at, block.num_rows, len(learnt))

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        """Merge what the blocks said, in their order; in the parent, `partials` never kept whole.

        Large things may go to files below `scratch`.
        """
        raise AssertionError(self.kind, at, partials, len(learnt), scratch)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        """The block as it is to be. The same block and learnt give the same bytes."""
        raise AssertionError(self.kind, block.num_rows, len(learnt))


class ColumnStep(Step):
    """A step that works on one column, or alike on several."""

    column: str | tuple[str, ...]
    """The column, or a list of them."""

    types: ClassVar[str] = ""
    """What the columns must be, in words; nothing: anything."""

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if not self.columns:
            raise SettingError(f"step {self.kind}: column = []: name at least one", "column")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if isinstance(self.column, str) else self.column

    def reads(self) -> list[str]:
        return list(self.columns)

    def apart_from(self, names: Collection[str]) -> Self | None:
        left = tuple(name for name in self.columns if name not in names)
        return self.model_copy(update={"column": left}) if left else None

    def fits(self, kind: pa.DataType) -> bool:
        """Whether it can work on a column of this type."""
        return kind is not None

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        after = super().check(names)
        for name in self.columns:
            if not self.fits(names[name]):
                raise DataError(
                    f"step {self.kind}: column {name!r} is of type {names[name]}: it must be "
                    f"{self.types}"
                )
        return after


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_string(kind))


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def without(block: pa.RecordBatch, reasons: Mapping[int, str], **counts: int) -> Cleaned:
    """The block without these rows, and why they are gone."""
    if not reasons:
        return Cleaned(block, counts=counts)
    stays = np.ones(block.num_rows, np.bool_)
    stays[list(reasons)] = False
    return Cleaned(block.filter(pa.array(stays)), sorted(reasons.items()), counts)


def replaced(block: pa.RecordBatch, name: str, column: Any) -> pa.RecordBatch:
    """The block with this column instead of the one of this name, or after all others."""
    at = block.schema.get_field_index(name)
    if at < 0:
        return block.append_column(name, column)
    return block.set_column(at, pa.field(name, column.type), column)


def mask(array: Any) -> NDArray[np.bool_]:
    """Arrow's booleans as numpy's; one that is missing is false."""
    flat = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return np.asarray(flat.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)
