"""Csv, tsv (pyarrow.csv)."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from echelon.core.errors import DataError, unknown
from echelon.data.formats import scan
from echelon.data.formats.blocks import Heading, cut_text, open_native, open_stream
from echelon.data.formats.records import (
    MISSING,
    Bad,
    Block,
    Parsed,
    Sieve,
    Source,
    all_utf8,
    empty,
    is_utf8,
    lacking,
    one_batch,
    shown,
    whole_block,
)

# --- parse/delimited ---
# csv and tsv: how they are cut, what columns they have, and good blocks at Arrow's speed.

_LOOKED_AT = 100
"""Records from which the number of columns is told where there is no header."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the cells of a file are written."""

    delimiter: str
    quote: bool

    @classmethod
    def of(cls, source: Source) -> Dialect:
        tsv = source.format == "tsv"
        delimiter = source.options.delimiter or ("\t" if tsv else ",")
        check_delimiter(source.options.path, delimiter)
        quote = source.options.quote
        return cls(delimiter, not tsv if quote is None else quote)

    @property
    def quoting(self) -> str | None:
        """The delimiter if cells may be quoted: what the scanner wants to know."""
        return self.delimiter if self.quote else None

    def cells(self, record: bytes) -> list[str]:
        text = record.decode("utf-8")
        if not self.quote:
            return text.split(self.delimiter)
        return next(quoted_cells([text], self.delimiter))


def cut(source: Source, size: int) -> Iterator[Block]:
    dialect = Dialect.of(source)

    def where(data: bytes, last: bool) -> tuple[int, bool]:
        if not dialect.quote:
            return scan.cut_lines(data, last), False
        return scan.cut_quoted(data, last, dialect.delimiter)

    return cut_text(source, size, where, partial(_heading, source, dialect))


def count(block: Block) -> int:
    dialect = Dialect.of(block.source)
    return len(scan.spans(block.content(), dialect.quoting, block.odd).starts)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    names = block.names or ()
    chosen = block.source.options.columns or names
    for name in chosen:
        if name not in names:
            raise DataError(f"{block.file}:1: {unknown('column', name, names)}")
    return _table(block).guessed(block.content(), block.odd, chosen)


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    names = block.names or ()
    if reason := lacking(wanted, names):
        return whole_block(block, wanted, reason, count(block), line=1)
    data, table = block.content(), _table(block)
    good = not block.odd and all_utf8(data)
    parsed = _quick(block, data, table, wanted) if good else None
    return parsed or _careful(block, data, table, wanted)


def _table(block: Block) -> Table:
    dialect = Dialect.of(block.source)
    missing = block.source.options.missing
    return Table(block.names or (), dialect.delimiter, dialect.quote, missing)


def _quick(block: Block, data: bytes, table: Table, wanted: pa.Schema) -> Parsed | None:
    """A block whose cells are all as they should be; rows of a wrong length are set aside."""
    read = table.read(data, wanted)
    if read is None:
        return None
    rows = read.batch.num_rows + len(read.ragged)
    if not read.ragged and rows == scan.lines_in(data) + (data[-1:] not in (b"\n", b"\r")):
        return Parsed(read.batch, block.record + np.arange(rows))
    spans = scan.spans(data, table.quoting, False)
    if len(spans.starts) != rows:
        return None
    lines = block.record + spans.lines
    bad = [
        Bad(
            block.file,
            int(lines[row]),
            table.told(cells),
            shown(data[spans.starts[row] : spans.ends[row]]),
        )
        for row, cells in read.ragged
    ]
    return Parsed(read.batch, np.delete(lines, [row for row, _ in read.ragged]), bad)


def _careful(block: Block, data: bytes, table: Table, wanted: pa.Schema) -> Parsed:
    """A block that has something bad in it."""

    def read(joined: bytes) -> Any | None:
        found = table.read(joined, wanted)
        return None if found is None else found.batch

    spans = scan.spans(data, table.quoting, block.odd)
    sieve = Sieve(data, spans, read, lambda record: table.refusal(record, wanted))
    for row in np.flatnonzero(spans.broken).tolist():
        sieve.reasons[row] = "its quotes do not match"
    # Bytes that are no text matter only in columns that are wanted.
    sieve.try_alone(lambda record: not is_utf8(record))
    rows = sieve.rest()
    misfits = table.misfits(sieve.joined(rows), wanted)
    sieve.reasons |= {rows[at]: reason for at, reason in misfits.items()}
    return sieve.parsed(block, wanted)


def _heading(source: Source, dialect: Dialect, data: bytes) -> Heading:
    options = source.options
    records = list(islice(scan.records(data, dialect.quoting, True), _LOOKED_AT))
    if not records:
        return Heading(len(data), None, "it begins with nothing but empty lines")
    try:
        first, second = _first_cells(dialect, data, records)
    except UnicodeDecodeError as error:
        if options.header is False and options.names:
            return Heading(0, options.names)
        return Heading(0, None, f"the columns' names are not UTF-8: {error.reason}")
    header = options.header
    if header is None:
        header = options.names is None and (second is None or has_header([first, second]))
    if not header:
        return Heading(0, options.names or _numbered(dialect, data, records))
    _, end, _, broken = records[0]
    size = end + (scan.first_line(data[end : end + 3] + b"x") or len(data) - end)
    names = options.names or tuple(first)
    twice = [name for name, times in Counter(names).items() if times > 1]
    fault = f"two columns are called {twice[0]!r}" if twice else None
    if broken:
        fault = "the quotes of the columns' names do not match"
    return Heading(size, names, fault)


def _first_cells(
    dialect: Dialect, data: bytes, records: list[tuple[int, int, int, bool]]
) -> tuple[list[str], list[str] | None]:
    """The cells of the first record, and of the second if there is one that can be read."""
    cells = [dialect.cells(data[start:end]) for start, end, _, _ in records[:1]]
    if len(records) > 1:
        start, end, _, _ = records[1]
        text = data[start:end].decode("utf-8", "replace").encode()
        cells.append(dialect.cells(text))
    return cells[0], cells[1] if len(cells) > 1 else None


def _numbered(
    dialect: Dialect, data: bytes, records: list[tuple[int, int, int, bool]]
) -> tuple[str, ...]:
    """`column0`, `column1`, …: as many as most records have cells."""
    widths = Counter(
        len(dialect.cells(data[start:end].decode("utf-8", "replace").encode()))
        for start, end, _, broken in records
        if not broken
    )
    width = widths.most_common(1)[0][0] if widths else 1
    return tuple(f"column{number}" for number in range(width))


# --- cells ---
# Delimited text → columns, by Arrow's parser.

_CHUNK = 1 << 18
"""Bytes that Arrow parses at a time: what stays in the cache is twice as quick."""
_MESSAGE = re.compile(r"In CSV column #(\d+): .*conversion error to (.*?): (.*)", re.DOTALL)
_VALUE = re.compile(r"invalid value '(.*)'", re.DOTALL)
# What numbers may look like, generously: of anything else Arrow need not be asked.
_WHOLE_NUMBER = r"^\s*[-+]?(?:0[xX][0-9a-fA-F]*|[0-9]*)\s*$"
_NUMBER = (
    r"^\s*[-+]?(?:[0-9]*\.?[0-9]*(?:[eE][-+]?[0-9]*)?|(?i:inf(?:inity)?|nan(?:\([^)]*\))?))\s*$"
)


class Read(NamedTuple):
    """Rows that could be read, and those with more or fewer cells than there are columns."""

    batch: Any
    ragged: list[tuple[int, int]]
    """Number of the record among those that are not empty, and how many cells it has."""


class Table:
    """How the rows of a file are to be read.

    Arrow cannot tell of a row of a wrong length that is not UTF-8: such rows must not come here,
    but to `refusal`.
    """

    def __init__(
        self, names: Sequence[str], delimiter: str, quote: bool, missing: Sequence[str]
    ) -> None:
        self.names = list(names)
        self._missing = list(missing)
        self._parse = {
            "delimiter": delimiter,
            "quote_char": '"' if quote else False,
            "newlines_in_values": quote,
        }
        self.quoting = delimiter if quote else None

    def read(self, data: bytes, wanted: pa.Schema) -> Read | None:
        """The wanted columns; None if a cell does not fit its type."""
        try:
            return self._strictly(data, wanted)
        except pa.ArrowInvalid:
            return None

    def refusal(self, record: bytes, wanted: pa.Schema) -> str | None:
        """Why this one record cannot be read; None if it can."""
        legible = record.decode("utf-8", "replace").encode()
        ragged = self._strictly(legible, pa.schema([])).ragged
        if ragged:
            return self.told(ragged[0][1])
        try:
            self._strictly(record, wanted)
        except pa.ArrowInvalid as error:
            return self._explained(str(error))
        return None

    def told(self, cells: int) -> str:
        """What is said of a row of a wrong length."""
        return f"{cells} cell{'s' * (cells != 1)}, but there are {len(self.names)} columns"

    def misfits(self, data: bytes, wanted: pa.Schema) -> dict[int, str]:
        """Rows that are bad at first sight, and why: too long, too short, words for numbers."""
        numbers = [f for f in wanted if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
        raw = pa.schema([pa.field(field.name, pa.large_binary()) for field in numbers])
        read = self._strictly(data, raw)
        reasons = {row: self.told(cells) for row, cells in read.ragged}
        rows = np.delete(np.arange(read.batch.num_rows + len(reasons)), list(reasons))
        missing = pa.array([word.encode() for word in self._missing], pa.large_binary())
        for field in numbers:
            column = read.batch.column(field.name)
            pattern = _WHOLE_NUMBER if pa.types.is_integer(field.type) else _NUMBER
            like = pc.match_substring_regex(column, pattern)
            wrong = pc.invert(pc.or_(like, pc.is_in(column, missing)))
            for at in np.flatnonzero(wrong.to_numpy(zero_copy_only=False)).tolist():
                value = column[at].as_py().decode("utf-8", "backslashreplace")
                reasons.setdefault(int(rows[at]), _unfit(field.name, value, str(field.type)))
        return reasons

    def guessed(self, data: bytes, odd: bool, chosen: Sequence[str]) -> pa.Schema | None:
        """The types of the columns by what is in them; None if no row can be read."""
        batch = self._guess(data, chosen) if not odd and all_utf8(data) else None
        if batch is None:
            spans = scan.spans(data, self.quoting, odd)
            whole = [data[s:e] for s, e, _, broken in zip(*spans, strict=True) if not broken]
            batch = self._guess(b"\n".join(row for row in whole if is_utf8(row)), chosen)
        return batch.schema if batch is not None and batch.num_rows else None

    def _guess(self, data: bytes, chosen: Sequence[str]) -> Any:
        try:
            return self._rows(data, {}, chosen).batch if data else None
        except pa.ArrowInvalid:
            return None

    def _strictly(self, data: bytes, wanted: pa.Schema) -> Read:
        if not data:
            return Read(empty(wanted), [])
        types = {field.name: field.type for field in wanted}
        read = self._rows(data, types, wanted.names)
        if not len(wanted):
            return read  # to count rows
        return Read(pa.RecordBatch.from_arrays(read.batch.columns, schema=wanted), read.ragged)

    def _rows(self, data: bytes, types: dict[str, Any], chosen: Sequence[str]) -> Read:
        try:
            return self._read(data, types, chosen, _CHUNK)
        except pa.ArrowInvalid as error:
            if len(data) <= _CHUNK or "straddl" not in str(error):
                raise
            return self._read(data, types, chosen, len(data) + 1)

    def _read(self, data: bytes, types: dict[str, Any], chosen: Sequence[str], chunk: int) -> Read:
        ragged: list[tuple[int, int]] = []

        def note(row: Any) -> str:
            ragged.append((row.number - 1, row.actual_columns))
            return "skip"

        if not chosen:  # Arrow would read all columns
            chosen, types = self.names[:1], {self.names[0]: pa.large_binary()}
        table = pa.csv.read_csv(
            pa.BufferReader(data),
            pa.csv.ReadOptions(column_names=self.names, block_size=chunk, use_threads=False),
            pa.csv.ParseOptions(**self._parse, invalid_row_handler=note),
            pa.csv.ConvertOptions(
                column_types=types, include_columns=list(chosen), null_values=self._missing
            ),
        )
        return Read(one_batch(table), ragged)

    def _explained(self, message: str) -> str:
        found = _MESSAGE.search(message)
        if not found:
            return message.splitlines()[0]
        name = self.names[int(found[1])]
        if "UTF8" in found[3]:
            return f"column {name!r} is not UTF-8"
        value = _VALUE.search(found[3])
        return _unfit(name, value[1] if value else "", found[2])


def _unfit(name: str, value: str, kind: str) -> str:
    return f"column {name!r} is {value!r}: not of type {kind}"


# --- readers/delimited ---
# csv and tsv.

BLOCK = 32 << 20
"""Bytes parsed at a time; types are inferred from the first of them."""
_LONGEST_CELL = (1 << 31) - 1
_READ_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*|nan|inf|\?|")
_ROW = re.compile(r"Row #(\d+)")
_COLUMN = re.compile(r"In CSV column #(\d+)")


def _read(
    path: Path,
    *,
    delimiter: str,
    quote: bool,
    header: bool | None = None,
    names: Sequence[str] | None = None,
    missing: Sequence[str] = MISSING,
    columns: Sequence[str] | None = None,
    types: Mapping[str, str] | None = None,
    block: int = BLOCK,
) -> Iterator[Any]:
    """Record batches of a file.

    `header` says whether the first line names the columns, which is found out if not given;
    columns without a name are called as `names` says, or `column0`, `column1`, …. `types` sets a
    column's type where the first block would mislead. Cells that stand for `missing` numbers
    become nulls.
    """
    check_delimiter(path, delimiter)
    cells = _first_cells_read(path, delimiter, quote)
    if header is None:
        header = {*cells[0]} <= {*names} if names else len(cells) < 2 or has_header(cells)
    called = None if header else names or [f"column{number}" for number in range(len(cells[0]))]
    read = pa.csv.ReadOptions(block_size=block, column_names=called, use_threads=False)
    parse = pa.csv.ParseOptions(delimiter=delimiter, quote_char='"' if quote else False)
    convert = pa.csv.ConvertOptions(
        null_values=list(missing),
        include_columns=list(columns) if columns else None,
        column_types=_types(path, types),
    )
    with open_native(path) as stream:
        try:
            with pa.csv.open_csv(stream, read, parse, convert) as reader:
                _unique(path, reader.schema.names)
                rows = 0
                for batch in reader:
                    _text_is_utf8(path, batch, rows + (called is None))
                    rows += batch.num_rows
                    yield batch
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:1: a column's name is not UTF-8: {error.reason}") from None
        except pa.ArrowException as error:
            raise DataError(_told(path, error)) from None
    if rows == 0:
        raise DataError(f"{path}: empty: it has a header but no records")


# Fields of a csv may stand in double quotes; in a tsv quotes are text like any other.
read_csv = partial(_read, delimiter=",", quote=True)
read_tsv = partial(_read, delimiter="\t", quote=False)


def check_delimiter(path: str | Path, delimiter: object) -> None:
    """Refuse what Arrow's parser cannot take for the end of a cell."""
    text = delimiter if isinstance(delimiter, str) else ""
    if len(text.encode()) != 1 or text in '"\r\n':
        raise DataError(
            f"{path}: option delimiter is {delimiter!r}: it must be one character, and no quote "
            f"or line's end"
        )


def quoted_cells(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """The cells of records that may be quoted."""
    # Python's own limit is 128 KiB for a cell, and one for the whole process: it is never lowered.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    return csv.reader(lines, delimiter=delimiter)


def _first_cells_read(path: Path, delimiter: str, quote: bool) -> list[list[str]]:
    """The first two lines, cut into cells."""
    with open_stream(path) as stream:
        # No more than a block: where lines end with returns alone, all of a file is one.
        raw = stream.readline(BLOCK) + stream.readline(BLOCK)
    if not raw:
        raise DataError(f"{path}: empty")
    lines = io.StringIO(raw.decode("utf-8-sig", "replace"), newline="")  # ends: \n, \r, \r\n
    if not quote:
        return [line.rstrip("\r\n").split(delimiter) for line in islice(lines, 2)]
    return list(islice(quoted_cells(lines, delimiter), 2))


def has_header(cells: list[list[str]]) -> bool:
    """Whether the first line names the columns: there are words above numbers, or no numbers."""
    first, second = [[bool(_READ_NUMBER.fullmatch(cell)) for cell in line] for line in cells[:2]]
    words_above_numbers = any(b and not a for a, b in zip(first, second, strict=False))
    return words_above_numbers or not any(first)


def _types(path: Path, types: Mapping[str, str] | None) -> dict[str, Any]:
    try:
        return {name: pa.type_for_alias(alias) for name, alias in (types or {}).items()}
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: option types: {error}") from None


def _unique(path: Path, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{path}:1: two columns are called {name!r}")
        seen.add(name)


def _text_is_utf8(path: Path, batch: Any, lines: int) -> None:
    """Arrow takes a column that is not UTF-8 for one of raw bytes."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not pa.types.is_binary(field.type):
            continue
        for row, value in enumerate(column.to_pylist()):
            try:
                (value or b"").decode("utf-8")
            except UnicodeDecodeError as error:
                where = f"{path}:{lines + row + 1}"
                raise DataError(
                    f"{where}: column {field.name!r} is not UTF-8: {error.reason}"
                ) from None


def _told(path: Path, error: Exception) -> str:
    """Arrow's message, with the line where a reader of messages looks for it."""
    message = str(error).splitlines()[0]
    row = _ROW.search(message)
    where = f"{path}:{row[1]}" if row else f"{path}"
    message = re.sub(r"^(CSV parse error|In CSV column #\d+): (Row #\d+: )?", "", message)
    if "invalid UTF8" in message:
        return f"{where}: not UTF-8"
    if "conversion error" in message:
        column = _COLUMN.search(str(error))
        number = f"column {column[1]}: " if column else ""
        return f"{where}: {number}{message}; set its type with the option `types`"
    return f"{where}: {message}"
