"""Input, Source, Block, Parsed, BadRecord; bisect bad records out; cast cells.

Files → blocks: pieces of about one size that are parsed each by itself.

Where they are cut depends on the input alone, so whatever is done block by block comes out the
same in any number of processes. The parent looks at every byte once, to cut where a record ends
and to count lines; a worker reads a plain local file again by itself, of all others it is given
the bytes.
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

# --- delimited ---

MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")


# --- inputs ---

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
"""Which settings of an input a format knows."""


class Input(Section):
    """One row of a recipe's `read`."""

    path: str
    """A file, a folder, a pattern such as `train*.csv.gz`, or an fsspec URL."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "text", "images", "idx", "libsvm"] = (
        "auto"
    )
    split: str | None = None
    """The split that all of it belongs to."""
    columns: tuple[str, ...] | None = None
    """Which columns to read; all if not given."""
    header: bool | None = None
    """Whether the first line of a csv or tsv names its columns; found out if not given."""
    names: tuple[str, ...] | None = None
    """What the columns of a csv or tsv without a header are called."""
    delimiter: str | None = None
    """What stands between the cells: `,` in a csv and a tab in a tsv, if not given."""
    quote: bool | None = None
    """Whether cells may stand in double quotes: in a csv, and not in a tsv, if not given."""
    missing: tuple[str, ...] = MISSING
    """Cells that stand for a number that is missing."""
    per: Literal["line", "file"] | None = None
    """What one text is: a file (usual for a folder) or a line (usual for a file)."""
    width: PositiveInt | None = None
    """How many features a libsvm file has at most."""
    zero_based: bool = False
    """Whether the features of a libsvm file count from 0."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file that is read, or one folder whose files are records."""

    file: str
    format: str
    options: Input = field(repr=False)
    size: int
    stamp: str
    """Changes when the file does: for telling whether work done before still holds."""
    label: str | None = None
    """The class of all its records, where a folder says it."""

    @property
    def split(self) -> str | None:
        return self.options.split


# --- blocks ---

SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of one input, cut at records."""

    number: int
    """Counts all blocks of all inputs, from 0."""
    file: str
    start: int
    """Where it begins: a byte of the content, a record, a row group or a file, by its format."""
    size: int
    record: int
    """Number of its first line or record, from 1."""
    source: Source = field(repr=False)
    names: tuple[str, ...] | None = None
    """The file's columns, where a header or the recipe names them."""
    members: tuple[tuple[str, str | None], ...] = field(default=(), repr=False)
    """Files that are records of their own, and the class of each."""
    data: bytes | None = field(default=None, repr=False)
    """Its content, where a worker cannot read it by itself."""
    fault: str | None = None
    """Why nothing of it can be read."""
    broken: int | None = 0
    """How many records the fault takes with it; None: all of this block."""
    odd: bool = False
    """Whether quotes do not match somewhere."""

    @property
    def split(self) -> str | None:
        return self.source.split

    def locate(self, line: int) -> tuple[str, int]:
        """File and line of the record that `Parsed.lines` has this number for."""
        return (self.members[line - self.record][0], 1) if self.members else (self.file, line)

    def content(self) -> bytes:
        """Its bytes."""
        if self.data is not None:
            return self.data
        with Path(self.file).open("rb") as file:
            file.seek(self.start)
            data = file.read(self.size)
        if len(data) < self.size:
            raise DataError(f"{self.file}: became shorter while it was read")
        return data


# --- parsed ---
# What a block was found to hold.

SHOWN = 500
"""Characters of a bad record that are kept to be looked at."""


@dataclass(frozen=True, slots=True)
class Bad:
    """Something that could not be read."""

    file: str
    line: int
    """Line or record number, from 1."""
    reason: str
    text: str = ""
    """The record, as far as it can be shown."""
    records: int = 1
    """How many records it stands for: none if a file is empty, many if it lacks a column."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Parsed:
    """Good records with the line each begins on, and bad ones."""

    batch: pa.RecordBatch
    lines: NDArray[np.int64]
    bad: list[Bad] = field(default_factory=list)

    @property
    def read(self) -> int:
        """How many records there were, good and bad."""
        return int(self.batch.num_rows) + sum(bad.records for bad in self.bad)


def shown(record: bytes | str, most: int = SHOWN) -> str:
    """A record that may be anything, as text; bytes that are none as `\\xff`."""
    if isinstance(record, bytes):
        record = record[: 4 * most].decode("utf-8", "backslashreplace")
    return record if len(record) <= most else record[:most] + "…"


def empty(wanted: pa.Schema) -> Any:
    """No rows of these columns."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in wanted], schema=wanted)


def whole_block(
    block: Block, wanted: pa.Schema, reason: str, records: int, line: int | None = None
) -> Parsed:
    """Nothing of a block can be read, for one reason."""
    text = shown(block.data or b"") if block.broken else ""
    bad = Bad(block.file, line or block.record, reason, text, records)
    return Parsed(empty(wanted), np.zeros(0, np.int64), [bad])


def lacking(wanted: pa.Schema, names: Sequence[str]) -> str | None:
    """What to say if the file has not all columns; where it has, nothing."""
    gone = [field.name for field in wanted if field.name not in names]
    if not gone:
        return None
    which = "column" if len(gone) == 1 else "columns"
    return f"{which} {', '.join(map(repr, gone))} missing: the file has {', '.join(names)}"


def one_batch(table: Any) -> Any:
    """A table as one record batch."""
    columns = [
        column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        for column in table.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=table.schema)


def is_utf8(record: bytes) -> bool:
    try:
        record.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def all_utf8(data: bytes) -> bool:
    """The same for much text: Arrow is quicker, and makes no copy."""
    offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
    whole = pa.Array.from_buffers(pa.large_utf8(), 1, [None, offsets, pa.py_buffer(data)])
    return valid(whole)


def valid(text: Any) -> bool:
    """Whether a column of text is UTF-8 throughout."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


# --- types ---
# The types that columns are read as.

_TEXT = ("string", "str", "text", "utf8", "large_string", "large_utf8")
_SHORT = {"int": "int64", "float": "float64", "time": "timestamp[us]", "date": "date32"}


def arrow_type(name: str, alias: str) -> Any:
    """What the setting of this name calls a type, as Arrow has it; texts have 64-bit offsets."""
    if alias in _TEXT:
        return pa.large_utf8()
    try:
        return pa.type_for_alias(_SHORT.get(alias, alias))
    except (ValueError, TypeError):
        raise DataError(
            f"{name} = {alias!r}: not a type; such as int64, float32, bool, string, "
            f"timestamp[s], date32"
        ) from None


def settled(kind: Any) -> Any:
    """An inferred type as it is kept; a column with nothing in it may get any text later."""
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


def wanted_schema(found: pa.Schema, types: Mapping[str, Any]) -> Any:
    """What a block has, with the recipe's types; what only the recipe has stands at the end."""
    fields = [
        pa.field(inner.name, types.get(inner.name, settled(inner.type)), metadata=inner.metadata)
        for inner in found
    ]
    more = [pa.field(name, kind) for name, kind in types.items() if name not in found.names]
    return pa.schema([*fields, *more])


# --- fit ---
# Columns of one type as columns of another; what does not fit is found cell by cell.

_SHOWN = 60


def fit(column: Any, kind: Any) -> tuple[Any, NDArray[np.bool_]]:
    """The column as this type, and which cells did not fit (they are missing in it).

    A value fits if nothing of it is lost: 2.0 is a whole number, 2.5 and "2.5" are none.
    """
    wrong = np.zeros(len(column), np.bool_)
    if column.type == kind:
        return column, wrong
    parts = list(_parts(column, kind, 0, wrong))
    return pa.concat_arrays(parts) if parts else pa.array([], kind), wrong


def _parts(column: Any, kind: Any, start: int, wrong: NDArray[np.bool_]) -> Any:
    try:
        yield column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        if len(column) == 1:
            wrong[start] = True
            yield pa.nulls(1, kind)
            return
        half = len(column) // 2
        yield from _parts(column[:half], kind, start, wrong)
        yield from _parts(column[half:], kind, start + half, wrong)


def conform(
    block: Block,
    columns: Mapping[str, Any],
    lines: NDArray[np.int64],
    wanted: pa.Schema,
    bad: list[Bad],
) -> Parsed:
    """The wanted columns of what was read; records with a cell that does not fit are bad."""
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
        bad = sorted([*bad, *found], key=lambda one: one.line)
    return Parsed(batch, lines, bad)


def texts_are_text(
    block: Block, columns: dict[str, Any], lines: NDArray[np.int64]
) -> tuple[dict[str, Any], NDArray[np.int64], list[Bad]]:
    """Without the records that have a text which is not UTF-8."""
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


# --- sieve ---
# Parts good records from bad ones in a block that has both.
#
# Whether a record is bad is what the parser says of it alone: a good one comes through whatever is
# beside it, and the same as from a block without bad ones.


class Sieve:
    """The records of a block, and why some of them are bad.

    `read` gives a batch with a row for each of some joined records, or None; `refusal` says what
    is wrong with one.
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
        """Records that are not known to be bad."""
        return [row for row in range(len(self.records)) if row not in self.reasons]

    def joined(self, rows: Sequence[int]) -> bytes:
        return b"\n".join([self.records[row] for row in rows])

    def try_alone(self, suspect: Callable[[bytes], bool]) -> None:
        """Ask about each record that is suspect."""
        for row in self.rest():
            record = self.records[row]
            if suspect(record) and (reason := self._refusal(record)):
                self.reasons[row] = reason

    def parsed(self, block: Block, wanted: pa.Schema) -> Parsed:
        """All that can be read, in order, and all that cannot."""
        batches = list(self._halved(self.rest()))
        batch = pa.concat_batches(batches) if batches else empty(wanted)
        lines = block.record + self._lines
        bad = [
            Bad(block.file, int(lines[row]), self.reasons[row], shown(self.records[row]))
            for row in sorted(self.reasons)
        ]
        return Parsed(batch, lines[np.array(self.rest(), np.int64)], bad)

    def _halved(self, rows: list[int]) -> Iterator[Any]:
        """What can be read of these: a part that cannot is halved until a bad one is alone."""
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


# --- shipped ---
# Records that are read as their file is cut: a block carries them as columns.


def ship(batch: Any) -> bytes:
    """A record batch as the bytes of a block."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def shipped(block: Block) -> Any:
    """The record batch that a block carries."""
    with pa.ipc.open_stream(pa.py_buffer(block.content())) as stream:
        return stream.read_next_batch()
