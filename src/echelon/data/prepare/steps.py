"""Transform: the base of cleaning steps and features; column values."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import Field, model_validator

from echelon.core.config.sections import Section, SettingError
from echelon.core.errors import ConfigError, DataError, unknown
from echelon.data.prepare.workdir import Learnt

# --- columns ---
# The columns of a block: raw ones as Arrow arrays, made ones as plain numpy memory.

Array: TypeAlias = NDArray[Any]


class Ragged(NamedTuple):
    """Rows of any length: row i is `values[offsets[i]:offsets[i + 1]]`; offsets begin at 0."""

    values: Array
    offsets: NDArray[np.int64]


class Sparse(NamedTuple):
    """Rows of a CSR matrix, as `core.types.Sparse` has them, but in numpy: no torch in workers."""

    indices: Array
    values: Array
    offsets: NDArray[np.int64]
    width: int


Values: TypeAlias = "pa.Array | Array | Ragged | Sparse"
"""A raw column (nulls are missing values), numbers of one fixed shape, or rows of any length."""
Columns: TypeAlias = Mapping[str, Values]
"""Column name → values of all rows of a block."""


SPLIT, RECORD = "@split", "@record"
"""What only a preparation knows of its rows, for features that read these names: the number of
each one's split (int8) and its own (int64). They are absent when new records are encoded."""

WEIGHT = "weight"
"""The column that `balance` writes, unless it resamples."""


def rows(values: Values) -> int:
    """How many rows a column has."""
    return len(values.offsets) - 1 if isinstance(values, Ragged | Sparse) else len(values)


def take(values: Values, chosen: NDArray[np.int64]) -> Values:
    """These rows, in this order."""
    if isinstance(values, Ragged):
        pick, offsets = _picking(values.offsets, chosen)
        return Ragged(pick(values.values), offsets)
    if isinstance(values, Sparse):
        pick, offsets = _picking(values.offsets, chosen)
        return Sparse(pick(values.indices), pick(values.values), offsets, values.width)
    if isinstance(values, np.ndarray):
        return values.take(chosen, 0)  # rows of several numbers: five times as quick as by [chosen]
    return values.take(pa.array(chosen))


def _picking(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[Callable[[Array], Array], NDArray[np.int64]]:
    """How to get at the entries of these rows, and the offsets of the rows that they make."""
    if each := _each(offsets):  # then they are the rows of a matrix, which are found quickly
        made = np.arange(0, each * len(chosen) + 1, each)
        return lambda column: column.reshape(-1, each).take(chosen, 0).reshape(-1), made
    at, made = entries(offsets, chosen)
    return lambda column: column[at], made


def _each(offsets: NDArray[np.int64]) -> int:
    """How many entries every row has, if all have as many; else 0."""
    count = len(offsets) - 1
    each = int(offsets[1]) if count else 0
    even = each * count == int(offsets[-1]) and bool((np.diff(offsets) == each).all())
    return each if even else 0


def take_all(block: Columns, chosen: NDArray[np.int64]) -> dict[str, Values]:
    """These rows of every column."""
    return {name: take(values, chosen) for name, values in block.items()}


def entries(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the entries of these rows are, and the offsets of the rows that they make."""
    starts = offsets[chosen]
    lengths = offsets[chosen + 1] - starts
    made = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(lengths, out=made[1:])
    at = np.repeat(starts - made[:-1], lengths)
    at += np.arange(made[-1])
    return at, made


# --- step ---
# What every kind of cleaning step has in common: a block in, the rows that stay out.


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


# --- feature ---
# What every kind of feature has in common: columns in, columns out, and what it learns.

MADE = pa.null()
"""Stands for the type of a column that an earlier feature makes: it is known only then."""


class Feature(Section):
    """One row of a recipe's `features`. A kind is one class and one row of the registry.

    A kind with a setting `seed` that a recipe leaves out gets the recipe's own.
    """

    kind: str
    source: str | list[str] = Field(alias="from")
    """The column it is made of, or several: of the data, or of an earlier feature."""
    to: str = ""
    """What the new column is called; left out: as the one it is made of."""

    passes: ClassVar[int] = 0
    """How often it has to look at all rows of the train split before it can encode."""
    by_length: ClassVar[bool] = False
    """Whether the longer a text is, the more it makes of it."""
    by_category: ClassVar[bool] = False
    """Whether texts of its sources may come as numbers into a list of the different ones."""

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if not self.sources:
            raise SettingError(f"feature {self.kind}: from = []: name at least one column", "from")
        return self

    @property
    def looks(self) -> int:
        """The same with these settings: kinds where it depends on them say so here."""
        return self.passes

    @property
    def sources(self) -> list[str]:
        """The columns it is made of."""
        return [self.source] if isinstance(self.source, str) else self.source

    @property
    def name(self) -> str:
        """The column it makes, where that is one."""
        return self.to or self.sources[0]

    def reads(self) -> list[str]:
        """Every column it wants to see: add those that other settings name, such as labels."""
        return self.sources

    def makes(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        """The columns it will make, and their types as far as they are known."""
        return {self.name: MADE}

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        """Refuse columns that are not there or of a wrong type, before any work is done."""
        for name in self.reads():
            if name not in names:
                raise DataError(f"feature {self.kind}: {unknown('column', name, names)}")

    def stamp(self) -> str:
        """Changes when a file does that it reads beside the data; nothing if it reads none."""
        return ""

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        """Pass `at` over the train rows of a block, in a worker: what this block says.

        `learnt` is what the passes before have learnt.
        """
        raise AssertionError(self.kind, at, len(block), len(learnt))

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        """Merge what the blocks said, in their order: what the next pass or `encode` is given.

        In the parent. `partials` is an iterator that must not be kept whole; large things may go
        to files below `scratch`.
        """
        raise AssertionError(self.kind, at, partials, len(learnt), scratch)

    def refused(self, block: Columns, learnt: Learnt) -> Mapping[int, str]:
        """Rows that cannot be encoded, and why: they go to the quarantine."""
        return {}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        """The new columns, row for row. The same block and learnt give the same bytes."""
        raise AssertionError(self.kind, len(block), len(learnt))

    def different(self, learnt: Learnt) -> int | None:
        """How many tokens or categories its column can tell apart, where it holds such: they are
        numbered from 0."""
        return None


# --- kinds ---
# Kinds of steps and features: named in a recipe, imported on use.


def chosen(what: str, kind: str, kinds: Mapping[str, str]) -> Any:
    """The class behind a kind; `kinds` says where each is, as `module:Class`."""
    if kind not in kinds:
        raise ConfigError(unknown(what, kind, kinds), ("kind",))
    module, _, name = kinds[kind].partition(":")
    return getattr(importlib.import_module(module), name)


# --- missing ---


def gaps(column: Any) -> NDArray[np.bool_]:
    """Where a value is missing."""
    gone = mask(pc.is_null(column, nan_is_null=True))
    if is_text(column.type):
        gone |= mask(pc.equal(pc.binary_length(column), 0))
    return gone


# --- numbers ---


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums that BLAS adds up in one order, however many threads a process has."""
    with _threads().limit(limits=1, user_api="blas"):
        yield


@cache
def _threads() -> Any:
    """To look for BLAS among all that is loaded takes milliseconds: once is enough for numpy's."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
