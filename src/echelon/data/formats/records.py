"""The types that recipes and block parsers share, and the tools that all block parsers use.

    Input ─ files.sources() ─▶ Source ─ cut() ─▶ Block ─ parse() ─▶ Parsed(batch, lines, bad)

An input is cut into blocks at places that depend on the input alone, so the result of work done
block by block is the same in any number of processes. The parent process reads every byte once, to
cut where a record ends and to count lines. A worker reads its part of a plain local file again
itself; for all other files the block carries the bytes.

The strict readers (see the package docstring) use only `MISSING`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import PositiveInt

from echelon.core.config.sections import Section
from echelon.core.errors import DataError
from echelon.data.formats.scan import Spans

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
"""Cells that stand for a missing number, unless the settings name others."""
_TABLE = frozenset({"header", "names", "delimiter", "quote", "columns", "missing"})
OPTIONS: Mapping[str, frozenset[str]] = {
    "csv": _TABLE,
    "tsv": _TABLE,
    "jsonl": frozenset({"columns"}),
    "parquet": frozenset({"columns"}),
    "text": frozenset({"per"}),
    "images": frozenset(),
    "idx": frozenset(),
    "libsvm": frozenset({"width", "zero_based"}),
}
"""The settings of an input that each format supports."""


class Input(Section):
    """One entry of a recipe's `read`: files to read, and how."""

    path: str
    """A file, a folder, a pattern such as `train*.csv.gz`, or an fsspec URL."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "text", "images", "idx", "libsvm"] = (
        "auto"
    )
    split: str | None = None
    """The split that all of its records belong to."""
    columns: tuple[str, ...] | None = None
    """Which columns to read; all if not given."""
    header: bool | None = None
    """Whether the first line of a csv or tsv names its columns; detected if not given."""
    names: tuple[str, ...] | None = None
    """The names of the columns of a csv or tsv without a header."""
    delimiter: str | None = None
    """The character between cells; by default `,` for csv and a tab for tsv."""
    quote: bool | None = None
    """Whether cells may stand in double quotes; by default they may in csv, but not in tsv."""
    missing: tuple[str, ...] = MISSING
    """Cells that stand for a missing number."""
    per: Literal["line", "file"] | None = None
    """One text per file (the default for a folder) or per line (the default for a file)."""
    width: PositiveInt | None = None
    """The largest number of features of a libsvm file."""
    zero_based: bool = False
    """Whether the features of a libsvm file count from 0, not from 1."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file to read, or one folder whose files are records."""

    file: str
    format: str
    options: Input = field(repr=False)
    size: int
    stamp: str
    """Changes when the file changes, so that earlier work on it can be recognized as outdated."""
    label: str | None = None
    """The class of all its records, if the file is in a class folder."""

    @property
    def split(self) -> str | None:
        return self.options.split


SIZE = 16 << 20
"""Bytes of a block, about."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of one source that begins and ends at records."""

    number: int
    """The block's place among all blocks of all inputs, from 0."""
    file: str
    start: int
    """Where it begins: a byte, a record, a row group or a file, depending on the format."""
    size: int
    record: int
    """The number of its first line or record, from 1."""
    source: Source = field(repr=False)
    names: tuple[str, ...] | None = None
    """The file's columns, if a header or the recipe names them."""
    members: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    """For formats with one record per file: the files, and the class of each."""
    data: bytes | None = field(default=None, repr=False)
    """Its content, if a worker cannot read it from the file itself."""
    fault: str | None = None
    """The reason why none of it can be read, or None."""
    broken: int | None = 0
    """The number of records lost to `fault`; None: all records of this block."""
    odd: bool = False
    """Whether quotes do not match somewhere, so that records must be found one by one."""

    @property
    def split(self) -> str | None:
        return self.source.split

    def locate(self, line: int) -> tuple[str, int]:
        """Return file and line of a record, given its entry in `Parsed.lines`."""
        return (self.members[line - self.record][0], 1) if self.members else (self.file, line)

    def content(self) -> bytes:
        """Return the bytes of the block, reading the file if it does not carry them."""
        if self.data is not None:
            return self.data
        with Path(self.file).open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.file}: became shorter while it was read")
        return data


@dataclass(frozen=True, slots=True)
class Parsed:
    """The result of parsing a block: good records, the line each begins on, and bad records."""

    batch: pa.RecordBatch
    lines: NDArray[np.int64]
    bad: list[Bad] = field(default_factory=list)

    @property
    def read(self) -> int:
        """The number of records, good and bad."""
        return int(self.batch.num_rows) + sum(bad.records for bad in self.bad)


@dataclass(frozen=True, slots=True)
class Bad:
    """A bad record, or a reason why several records could not be read."""

    file: str
    line: int
    """The number of the line or record, from 1."""
    reason: str
    text: str = ""
    """The beginning of the record."""
    records: int = 1
    """How many records are lost: 0 if a file is empty, many if it lacks a column."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


SHOWN = 500
"""Characters of a bad record that are kept to show it."""


def shown(record: bytes | str, most: int = SHOWN) -> str:
    """Return the beginning of a record as text; bytes that are not UTF-8 become `\\xff`."""
    if isinstance(record, bytes):
        record = record[: 4 * most].decode("utf-8", "backslashreplace")
    return record if len(record) <= most else record[:most] + "…"


# Results for a whole block


def whole_block(
    block: Block, wanted: pa.Schema, reason: str, records: int, line: int | None = None
) -> Parsed:
    """Return the result for a block that cannot be read at all, for one reason."""
    text = shown(block.data or b"") if block.broken else ""
    bad = Bad(block.file, line or block.record, reason, text, records)
    return Parsed(empty(wanted), np.zeros(0, np.int64), [bad])


def lacking(wanted: pa.Schema, names: Sequence[str]) -> str | None:
    """Return the reason for wanted columns that the file does not have, or None."""
    gone = [field.name for field in wanted if field.name not in names]
    if not gone:
        return None
    which = "column" if len(gone) == 1 else "columns"
    return f"{which} {', '.join(map(repr, gone))} missing: the file has {', '.join(names)}"


def empty(wanted: pa.Schema) -> Any:
    """Return a batch of these columns without rows."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in wanted], schema=wanted)


def one_batch(table: Any) -> Any:
    """Return a table as one record batch."""
    columns = [
        column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        for column in table.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


# Types of columns


def arrow_type(name: str, alias: str) -> Any:
    """Return the Arrow type that a setting names; `name` is the setting, for the error.

    Texts have 64-bit offsets.
    """
    if alias in _TEXT:
        return pa.large_utf8()
    try:
        return pa.type_for_alias(_SHORT.get(alias, alias))
    except (ValueError, TypeError):
        raise DataError(
            f"{name} = {alias!r}: not a type; such as int64, float32, bool, string, "
            f"timestamp[s], date32"
        ) from None


_TEXT = ("string", "str", "text", "utf8", "large_string", "large_utf8")
_SHORT = {"int": "int64", "float": "float64", "time": "timestamp[us]", "date": "date32"}


def wanted_schema(found: pa.Schema, types: Mapping[str, Any]) -> Any:
    """Return an inferred schema with the recipe's types; columns only it names go to the end."""
    fields = [
        pa.field(inner.name, types.get(inner.name, settled(inner.type)), metadata=inner.metadata)
        for inner in found
    ]
    more = [pa.field(name, kind) for name, kind in types.items() if name not in found.names]
    return pa.schema([*fields, *more])


def settled(kind: Any) -> Any:
    """Return the type that an inferred type is kept as.

    Texts, bytes and lists get 64-bit offsets. A column of nulls alone becomes text, because later
    blocks may have any text in it.
    """
    if pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.large_utf8()
    if pa.types.is_dictionary(kind):
        return settled(kind.value_type)
    if pa.types.is_binary(kind):
        return pa.large_binary()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(settled(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(inner.name, settled(inner.type)) for inner in kind])
    return kind


# Casting: columns of one type as columns of another


def conform(
    block: Block,
    columns: Mapping[str, Any],
    lines: NDArray[np.int64],
    wanted: pa.Schema,
    bad: list[Bad],
) -> Parsed:
    """Cast parsed columns to the wanted ones; records with a cell that does not fit are bad.

    `bad` are the records already found to be bad.
    """
    wrong = np.zeros(len(lines), np.bool_)
    arrays = []
    found: list[Bad] = []
    for column in wanted:
        array, misfits = fit(columns[column.name], column.type)
        for row in np.flatnonzero(misfits & ~wrong).tolist():
            value = shown(str(columns[column.name][row].as_py()), _SHOWN)
            reason = f"column {column.name!r} is {value!r}: not of type {column.type}"
            whole = {name: cells[row].as_py() for name, cells in columns.items()}
            found.append(Bad(block.file, int(lines[row]), reason, shown(str(whole))))
        wrong |= misfits
        arrays.append(array)
    batch = pa.RecordBatch.from_arrays(arrays, schema=wanted)
    if wrong.any():
        batch, lines = batch.filter(pa.array(~wrong)), lines[~wrong]
    if found:
        bad = sorted([*bad, *found], key=lambda entry: entry.line)
    return Parsed(batch, lines, bad)


_SHOWN = 60
"""Characters of a misfitting value that are shown in the reason."""


def fit(column: Any, kind: Any) -> tuple[Any, NDArray[np.bool_]]:
    """Cast a column and return it with a mask of the cells that did not fit, now missing.

    A value fits if the cast loses nothing: 2.0 fits an integer type, 2.5 and "2.5" do not.
    """
    wrong = np.zeros(len(column), np.bool_)
    if column.type == kind:
        return column, wrong
    parts = list(_cast_halves(column, kind, 0, wrong))
    return pa.concat_arrays(parts) if parts else pa.array([], kind), wrong


def _cast_halves(column: Any, kind: Any, start: int, wrong: NDArray[np.bool_]) -> Any:
    try:
        yield column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if len(column) == 1:
            wrong[start] = True
            yield pa.nulls(1, kind)
            return
        half = len(column) // 2
        yield from _cast_halves(column[:half], kind, start, wrong)
        yield from _cast_halves(column[half:], kind, start + half, wrong)


# Text that is not UTF-8


def texts_are_text(
    block: Block, columns: dict[str, Any], lines: NDArray[np.int64]
) -> tuple[dict[str, Any], NDArray[np.int64], list[Bad]]:
    """Remove the records with a text that is not UTF-8; return columns, lines, bad records."""
    broken = np.zeros(len(lines), np.bool_)
    bad: list[Bad] = []
    for name, column in columns.items():
        if not _is_text(column.type) or valid(column):
            continue
        raw = column.cast(pa.large_binary()).to_pylist()
        for row, value in enumerate(raw):
            if value is not None and not broken[row] and not is_utf8(value):
                broken[row] = True
                reason = f"column {name!r} is not UTF-8"
                bad.append(Bad(block.file, int(lines[row]), reason, shown(value)))
    if broken.any():
        kept = pa.array(~broken)
        columns = {name: column.filter(kept) for name, column in columns.items()}
    return columns, lines[~broken], bad


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def valid(text: Any) -> bool:
    """Return whether a column of text is UTF-8 throughout."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def all_utf8(data: bytes) -> bool:
    """Return whether a large piece is UTF-8. Arrow is faster than `is_utf8` and makes no copy."""
    offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
    whole = pa.Array.from_buffers(pa.large_utf8(), 1, [None, offsets, pa.py_buffer(data)])
    return valid(whole)


def is_utf8(record: bytes) -> bool:
    try:
        record.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


# Bad records in a block of text


class Sieve:
    """A search for the bad records in a block of text that cannot be parsed in one call.

    Records are parsed together; a group that fails is halved until each bad record is alone.
    Whether a record is bad is what the parser says of it alone, so a good record gives the same
    result next to any other records.

    `read` parses records joined by line feeds into a batch with one row per record, or returns
    None. `refusal` returns the reason why one record is bad, or None.
    """

    def __init__(
        self,
        data: bytes,
        spans: Spans,
        read: Callable[[bytes], Any | None],
        refusal: Callable[[bytes], str | None],
    ) -> None:
        bounds = zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)
        self.records = [data[start:end] for start, end in bounds]
        self.reasons: dict[int, str] = {}
        self._lines = spans.lines
        self._read = read
        self._refusal = refusal

    def rest(self) -> list[int]:
        """Return the numbers of the records not known to be bad."""
        return [row for row in range(len(self.records)) if row not in self.reasons]

    def joined(self, rows: Sequence[int]) -> bytes:
        return b"\n".join([self.records[row] for row in rows])

    def try_alone(self, suspect: Callable[[bytes], bool]) -> None:
        """Call `refusal` for each record that `suspect` selects."""
        for row in self.rest():
            record = self.records[row]
            if suspect(record) and (reason := self._refusal(record)):
                self.reasons[row] = reason

    def parsed(self, block: Block, wanted: pa.Schema) -> Parsed:
        """Parse all records not known to be bad; return good and bad ones in order."""
        batches = list(self._halved(self.rest()))
        batch = pa.concat_batches(batches) if batches else empty(wanted)
        lines = block.record + self._lines
        bad = [
            Bad(block.file, int(lines[row]), self.reasons[row], shown(self.records[row]))
            for row in sorted(self.reasons)
        ]
        return Parsed(batch, lines[np.array(self.rest(), np.int64)], bad)

    def _halved(self, rows: list[int]) -> Iterator[Any]:
        """Parse these records; halve a group that fails until a bad record is alone."""
        if not rows:
            return
        batch = self._read(self.joined(rows))
        if batch is not None and batch.num_rows == len(rows):
            yield batch
        elif len(rows) == 1:
            self.reasons[rows[0]] = self._refusal(self.records[rows[0]]) or "it cannot be read"
        else:
            half = len(rows) // 2
            yield from self._halved(rows[:half])
            yield from self._halved(rows[half:])


# Blocks that carry parsed records


def ship(batch: Any) -> bytes:
    """Serialize a record batch as the bytes of a block.

    For formats whose records are read while the file is cut: idx, and large row groups of Parquet.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def shipped(block: Block) -> Any:
    """Return the record batch that `ship` put into a block."""
    with pa.ipc.open_stream(pa.py_buffer(block.content())) as stream:
        return stream.read_next_batch()
