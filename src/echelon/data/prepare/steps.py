"""The interfaces of cleaning steps and features, and the columns they work on.

Both learn and apply like scikit-learn's fit and transform, but block by block and over processes:

                         worker, per block         parent                      worker, per block
    Step     (clean)     look ─▶ partial result ─▶ learn: merge all of them ─▶ clean ─▶ Cleaned
    Feature  (features)  look ─▶ partial result ─▶ learn: merge all of them ─▶ refused, encode

A kind that needs no knowledge of other records has `passes = 0`: neither `look` nor `learn` is
called. With several passes, each `look` is given what the pass before has learnt. Partial results
are merged in block order and everything is deterministic, so the output does not depend on the
number of processes.
"""

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

Array: TypeAlias = NDArray[Any]


class Ragged(NamedTuple):
    """Rows of any length: row i is `values[offsets[i]:offsets[i + 1]]`; `offsets[0]` is 0."""

    values: Array
    offsets: NDArray[np.int64]


class Sparse(NamedTuple):
    """Rows of a CSR matrix, like `core.types.Sparse` but in numpy: workers need no torch."""

    indices: Array
    values: Array
    offsets: NDArray[np.int64]
    width: int


Values: TypeAlias = "pa.Array | Array | Ragged | Sparse"
"""A raw column (nulls are missing values), numbers of one fixed shape, or rows of any length."""
Columns: TypeAlias = Mapping[str, Values]
"""Column name → values of all rows of a block."""
SPLIT, RECORD = "@split", "@record"
"""Columns that exist only while data is prepared: the split (int8, an index into SPLITS) and the
number (int64) of each record. A feature reads them by naming them in `reads`."""
WEIGHT = "weight"
"""The column that `balance: weight` writes."""


# The two interfaces: cleaning steps and features


class Step(Section):
    """One row of a recipe's `clean`. A kind is one class and one row of STEPS in recipe.py."""

    kind: str

    passes: ClassVar[int] = 0
    """The number of passes over all rows that this kind needs before it can clean."""

    @property
    def looks(self) -> int:
        """The passes that this step needs with its settings."""
        return self.passes

    def reads(self) -> list[str]:
        """Return the columns that the step reads."""
        return []

    def adds(self) -> dict[str, str]:
        """Return new column → the column it is made of."""
        return {}

    def apart_from(self, names: Collection[str]) -> Self | None:
        """Return the step for records without these columns, or None if it needs one of them."""
        return None if {*self.reads()} & {*names} else self

    def check(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        """Return the columns after the step; raise DataError if it cannot work on those before."""
        for name in self.reads():
            if name not in names:
                raise DataError(f"step {self.kind}: {unknown('column', name, names)}")
        return dict(names)

    def look(self, at: int, block: pa.RecordBatch, learnt: Learnt) -> Learnt:
        """Return what a block contributes to pass `at`; it has passed the steps before this one.

        Runs in a worker.
        """
        raise AssertionError(self.kind, at, block.num_rows, len(learnt))

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        """Merge the partial results of pass `at`, which come in block order.

        Runs in the parent. `partials` is an iterator too large to keep as a whole; large
        intermediate results may go to files below `scratch`.
        """
        raise AssertionError(self.kind, at, partials, len(learnt), scratch)

    def clean(self, block: pa.RecordBatch, learnt: Learnt) -> Cleaned:
        """Return the cleaned block. The same block and `learnt` must give the same bytes."""
        raise AssertionError(self.kind, block.num_rows, len(learnt))


class ColumnStep(Step):
    """A step that treats one column, or each of several."""

    column: str | tuple[str, ...]
    """The column, or a list of them."""

    types: ClassVar[str] = ""
    """What the columns must be, in words for the error message."""

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
        """Return whether the step can work on a column of this type."""
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


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The result of a step: the rows of its block in order, without those it dropped."""

    block: pa.RecordBatch
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """Rows of the given block, and why they were dropped: they go to the quarantine."""
    counts: dict[str, int] = field(default_factory=dict)
    """Other changes → how many rows they affected."""
    noted: list[tuple[int, str]] = field(default_factory=list)
    """Rows of the given block that are flagged but stay, and why."""


class Feature(Section):
    """One row of a recipe's `features`. A kind is one class and one row of FEATURES in recipe.py.

    A kind with a setting `seed` gets the recipe's seed by default.
    """

    kind: str
    source: str | list[str] = Field(alias="from")
    """The column or columns it is made of: of the data, or of earlier features."""
    to: str = ""
    """The name of the new column; by default that of the column it is made of."""

    passes: ClassVar[int] = 0
    """The number of passes over the train records that this kind needs before it can encode."""
    by_length: ClassVar[bool] = False
    """Whether longer texts make longer rows, so that shards are balanced by their lengths."""
    by_category: ClassVar[bool] = False
    """Whether the texts of its sources may be dictionary-encoded."""

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if not self.sources:
            raise SettingError(f"feature {self.kind}: from = []: name at least one column", "from")
        return self

    @property
    def looks(self) -> int:
        """The passes that this feature needs with its settings."""
        return self.passes

    @property
    def sources(self) -> list[str]:
        """The columns it is made of, as a list."""
        return [self.source] if isinstance(self.source, str) else self.source

    @property
    def name(self) -> str:
        """The column it makes."""
        return self.to or self.sources[0]

    def reads(self) -> list[str]:
        """Return every column that it reads; kinds add those of other settings, such as labels."""
        return self.sources

    def makes(self, names: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        """Return the columns it makes, with their types or MADE."""
        return {self.name: MADE}

    def check(self, names: Mapping[str, pa.DataType]) -> None:
        """Raise DataError if a column is missing or of a wrong type. Runs before any work."""
        for name in self.reads():
            if name not in names:
                raise DataError(f"feature {self.kind}: {unknown('column', name, names)}")

    def stamp(self) -> str:
        """Return a text that changes with any file that it reads beside the data."""
        return ""

    def look(self, at: int, block: Columns, learnt: Learnt) -> Learnt:
        """Return what the train records of a block contribute to pass `at`. Runs in a worker.

        `learnt` is the result of the pass before.
        """
        raise AssertionError(self.kind, at, len(block), len(learnt))

    def learn(self, at: int, partials: Iterable[Learnt], learnt: Learnt, scratch: Path) -> Learnt:
        """Merge the partial results of pass `at`; the result goes to the next pass or `encode`.

        Runs in the parent. `partials` come in block order, from an iterator too large to keep as a
        whole; large intermediate results may go to files below `scratch`.
        """
        raise AssertionError(self.kind, at, partials, len(learnt), scratch)

    def refused(self, block: Columns, learnt: Learnt) -> Mapping[int, str]:
        """Return the rows that cannot be encoded, and why; they go to the quarantine."""
        return {}

    def encode(self, block: Columns, learnt: Learnt) -> dict[str, Values]:
        """Return the new columns, row for row; `refused` found no row of the block.

        The same block and `learnt` must give the same bytes.
        """
        raise AssertionError(self.kind, len(block), len(learnt))

    def different(self, learnt: Learnt) -> int | None:
        """Return the number of tokens or categories if the column holds such, numbered from 0."""
        return None


MADE = pa.null()
"""Stands for the type of a column that a feature makes, which is known only when it is made."""


def chosen(what: str, kind: str, kinds: Mapping[str, str]) -> Any:
    """Import and return the class of a kind; `kinds` maps each kind to `module:Class`."""
    if kind not in kinds:
        raise ConfigError(unknown(what, kind, kinds), ("kind",))
    module, _, name = kinds[kind].partition(":")
    return getattr(importlib.import_module(module), name)


# Helpers for Arrow columns and record batches


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_string(kind))


def is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def gaps(column: Any) -> NDArray[np.bool_]:
    """Return where a value is missing: null, NaN or an empty text."""
    gone = mask(pc.is_null(column, nan_is_null=True))
    if is_text(column.type):
        gone |= mask(pc.equal(pc.binary_length(column), 0))
    return gone


def mask(array: Any) -> NDArray[np.bool_]:
    """Return Arrow booleans as numpy booleans; null is False."""
    flat = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    return np.asarray(flat.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)


def without(block: pa.RecordBatch, reasons: Mapping[int, str], **counts: int) -> Cleaned:
    """Return the block without these rows."""
    if not reasons:
        return Cleaned(block, counts=counts)
    stays = np.ones(block.num_rows, np.bool_)
    stays[list(reasons)] = False
    return Cleaned(block.filter(pa.array(stays)), sorted(reasons.items()), counts)


def replaced(block: pa.RecordBatch, name: str, column: Any) -> pa.RecordBatch:
    """Return the block with the column of this name replaced, or appended if there is none."""
    at = block.schema.get_field_index(name)
    if at < 0:
        return block.append_column(name, column)
    return block.set_column(at, pa.field(name, column.type), column)


# Helpers for columns in any form


def rows(values: Values) -> int:
    """Return the number of rows of a column."""
    return len(values.offsets) - 1 if isinstance(values, Ragged | Sparse) else len(values)


def take(values: Values, chosen: NDArray[np.int64]) -> Values:
    """Return the chosen rows, in the order of `chosen`."""
    if isinstance(values, Ragged):
        pick, offsets = _picking(values.offsets, chosen)
        return Ragged(pick(values.values), offsets)
    if isinstance(values, Sparse):
        pick, offsets = _picking(values.offsets, chosen)
        return Sparse(pick(values.indices), pick(values.values), offsets, values.width)
    if isinstance(values, np.ndarray):
        return values.take(chosen, 0)  # five times as fast as values[chosen] for wide rows
    return values.take(pa.array(chosen))


def take_all(block: Columns, chosen: NDArray[np.int64]) -> dict[str, Values]:
    """Return the chosen rows of every column."""
    return {name: take(values, chosen) for name, values in block.items()}


def _picking(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[Callable[[Array], Array], NDArray[np.int64]]:
    """Return a function that picks the entries of the chosen rows, and their new offsets."""
    if each := _each(offsets):  # rows of equal length are a matrix, whose rows are fast to take
        made = np.arange(0, each * len(chosen) + 1, each)
        return lambda column: column.reshape(-1, each).take(chosen, 0).reshape(-1), made
    at, made = entries(offsets, chosen)
    return lambda column: column[at], made


def _each(offsets: NDArray[np.int64]) -> int:
    """Return the length of the rows if all are of one length, else 0."""
    count = len(offsets) - 1
    each = int(offsets[1]) if count else 0
    even = each * count == int(offsets[-1]) and bool((np.diff(offsets) == each).all())
    return each if even else 0


def entries(
    offsets: NDArray[np.int64], chosen: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the entries of the chosen rows, and the offsets of these rows."""
    starts = offsets[chosen]
    lengths = offsets[chosen + 1] - starts
    made = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(lengths, out=made[1:])
    at = np.repeat(starts - made[:-1], lengths)
    at += np.arange(made[-1])
    return at, made


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS to one thread: the order in which sums are added must not depend on threads."""
    with _threads().limit(limits=1, user_api="blas"):
        yield


@cache
def _threads() -> Any:
    """Find the BLAS library of numpy. Cached, because the search takes milliseconds."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
