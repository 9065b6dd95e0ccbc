"""csv and tsv, parsed by pyarrow.csv.

The block parser (`cut`, `count`, `infer`, `parse`) serves recipes. It parses a good block in one
call of Arrow; for a block with anything bad in it, `Sieve` finds the bad rows. `Dialect` says how
cells are written, and `Table` wraps Arrow's parser for one block.

The strict readers `read_csv` and `read_tsv` serve jobs without a recipe. They stream a file through
Arrow and raise the first error. Its line is counted from the records read, so it is too small after
empty lines or line ends within quotes. Both readers share `has_header`, `quoted_cells` and
`check_delimiter`.
"""

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
from echelon.data.formats.cutting import Heading, cut_text
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
from echelon.data.formats.streams import BLOCK, open_native, open_stream

# Block parser


def cut(source: Source, size: int) -> Iterator[Block]:
    dialect = Dialect.of(source)

    def where(data: bytes, last: bool) -> tuple[int, bool]:
        if not dialect.quote:
            return scan.cut_lines(data, last), False
        return scan.cut_quoted(data, last, dialect.delimiter)

    return cut_text(source, size, where, partial(_heading, source, dialect))


_LOOKED_AT = 100
"""Records that decide the number of columns of a file without a header."""


def _heading(source: Source, dialect: Dialect, data: bytes) -> Heading:
    """Find the names of the columns, and where the records begin."""
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
    """Return the cells of the first record and, if there is one, of the second."""
    cells = [dialect.cells(data[start:end]) for start, end, _, _ in records[:1]]
    if len(records) > 1:
        start, end, _, _ = records[1]
        text = data[start:end].decode("utf-8", "replace").encode()
        cells.append(dialect.cells(text))
    return cells[0], cells[1] if len(cells) > 1 else None


def _numbered(
    dialect: Dialect, data: bytes, records: list[tuple[int, int, int, bool]]
) -> tuple[str, ...]:
    """Return the names `column0`, `column1`, …, as many as the most common number of cells."""
    widths = Counter(
        len(dialect.cells(data[start:end].decode("utf-8", "replace").encode()))
        for start, end, _, broken in records
        if not broken
    )
    width = widths.most_common(1)[0][0] if widths else 1
    return tuple(f"column{number}" for number in range(width))


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
    """Parse a block in one call and set aside rows of a wrong length.

    Return None if a cell does not fit its type, or if Arrow and the scanner count different rows.
    """
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
            table.wrong_length(cells),
            shown(data[spans.starts[row] : spans.ends[row]]),
        )
        for row, cells in read.ragged
    ]
    return Parsed(read.batch, np.delete(lines, [row for row, _ in read.ragged]), bad)


def _careful(block: Block, data: bytes, table: Table, wanted: pa.Schema) -> Parsed:
    """Parse a block that holds bad records."""

    def read(joined: bytes) -> Any | None:
        found = table.read(joined, wanted)
        return None if found is None else found.batch

    spans = scan.spans(data, table.quoting, block.odd)
    sieve = Sieve(data, spans, read, lambda record: table.refusal(record, wanted))
    for row in np.flatnonzero(spans.broken).tolist():
        sieve.reasons[row] = "its quotes do not match"
    # Invalid UTF-8 makes a record bad only if it is in a wanted column: parse each one alone.
    sieve.try_alone(lambda record: not is_utf8(record))
    rows = sieve.rest()
    misfits = table.misfits(sieve.joined(rows), wanted)
    sieve.reasons |= {rows[at]: reason for at, reason in misfits.items()}
    return sieve.parsed(block, wanted)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The delimiter of a file's cells, and whether they may stand in double quotes."""

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
        """The delimiter if cells may be quoted, else None: what the functions of `scan` take."""
        return self.delimiter if self.quote else None

    def cells(self, record: bytes) -> list[str]:
        text = record.decode("utf-8")
        if not self.quote:
            return text.split(self.delimiter)
        return next(quoted_cells([text], self.delimiter))


class Table:
    """Arrow's csv parser with the column names and the dialect of one file.

    Arrow cannot report a row of a wrong length that is not UTF-8. So a record that is not UTF-8
    must pass `refusal` before it is given to `read` or `misfits`.
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
        """Return the wanted columns, or None if a cell does not fit its type."""
        try:
            return self._strictly(data, wanted)
        except pa.ArrowInvalid:
            return None

    def refusal(self, record: bytes, wanted: pa.Schema) -> str | None:
        """Return the reason why one record is bad, or None if it is good."""
        legible = record.decode("utf-8", "replace").encode()
        ragged = self._strictly(legible, pa.schema([])).ragged
        if ragged:
            return self.wrong_length(ragged[0][1])
        try:
            self._strictly(record, wanted)
        except pa.ArrowInvalid as error:
            return self._explained(str(error))
        return None

    def wrong_length(self, cells: int) -> str:
        """Return the reason for a row with a wrong number of cells."""
        return f"{cells} cell{'s' * (cells != 1)}, but there are {len(self.names)} columns"

    def misfits(self, data: bytes, wanted: pa.Schema) -> dict[int, str]:
        """Return rows that are bad at first sight, and why: wrong length, words for numbers."""
        numbers = [f for f in wanted if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
        raw = pa.schema([pa.field(field.name, pa.large_binary()) for field in numbers])
        read = self._strictly(data, raw)
        reasons = {row: self.wrong_length(cells) for row, cells in read.ragged}
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
        """Infer the types of the chosen columns; return None if no row can be read."""
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
            return read  # the caller only counts rows
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

        if not chosen:  # without a choice Arrow would read all columns
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


class Read(NamedTuple):
    """Rows that Arrow has read, and rows with more or fewer cells than there are columns."""

    batch: Any
    ragged: list[tuple[int, int]]
    """(number of the record, not counting empty ones; number of its cells)."""


def _unfit(name: str, value: str, kind: str) -> str:
    return f"column {name!r} is {value!r}: not of type {kind}"


_CHUNK = 1 << 18
"""Bytes that Arrow parses at a time: twice as fast as more, because they stay in the cache."""
# Cells that may be numbers, generously. Everything else is bad without asking Arrow.
_WHOLE_NUMBER = r"^\s*[-+]?(?:0[xX][0-9a-fA-F]*|[0-9]*)\s*$"
_NUMBER = (
    r"^\s*[-+]?(?:[0-9]*\.?[0-9]*(?:[eE][-+]?[0-9]*)?|(?i:inf(?:inity)?|nan(?:\([^)]*\))?))\s*$"
)
_MESSAGE = re.compile(r"In CSV column #(\d+): .*conversion error to (.*?): (.*)", re.DOTALL)
_VALUE = re.compile(r"invalid value '(.*)'", re.DOTALL)


# Strict readers


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
    """Yield the record batches of a file.

    `header` says whether the first line names the columns; None detects it. Without a header the
    columns are called `names`, or `column0`, `column1`, …. `types` sets the type of a column where
    the first block would mislead. Cells equal to one of `missing` become nulls in columns of
    numbers.
    """
    check_delimiter(path, delimiter)
    cells = _first_two_rows(path, delimiter, quote)
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
            raise DataError(_message(path, error)) from None
    if rows == 0:
        raise DataError(f"{path}: empty: it has a header but no records")


# Cells of a csv may stand in double quotes; in a tsv, quotes are ordinary text.
read_csv = partial(_read, delimiter=",", quote=True)
read_tsv = partial(_read, delimiter="\t", quote=False)


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
    """Refuse columns of raw bytes: Arrow infers that type for text that is not UTF-8."""
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


def _message(path: Path, error: Exception) -> str:
    """Return Arrow's message with its line number moved to the front: `FILE:LINE: reason`."""
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


_ROW = re.compile(r"Row #(\d+)")
_COLUMN = re.compile(r"In CSV column #(\d+)")


def _first_two_rows(path: Path, delimiter: str, quote: bool) -> list[list[str]]:
    """Return the cells of the first two records, or of one if the file has no more."""
    with open_stream(path) as stream:
        # At most a block each: a file whose lines end with \r alone is one line for `readline`.
        raw = stream.readline(BLOCK) + stream.readline(BLOCK)
    if not raw:
        raise DataError(f"{path}: empty")
    lines = io.StringIO(raw.decode("utf-8-sig", "replace"), newline="")  # ends: \n, \r, \r\n
    if not quote:
        return [line.rstrip("\r\n").split(delimiter) for line in islice(lines, 2)]
    return list(islice(quoted_cells(lines, delimiter), 2))


# For both readers


def check_delimiter(path: str | Path, delimiter: object) -> None:
    """Refuse a delimiter that Arrow's parser does not support."""
    text = delimiter if isinstance(delimiter, str) else ""
    if len(text.encode()) != 1 or text in '"\r\n':
        raise DataError(
            f"{path}: option delimiter is {delimiter!r}: it must be one character, and no quote "
            f"or line's end"
        )


def has_header(cells: list[list[str]]) -> bool:
    """Return whether the first of two rows names the columns.

    It does if it has a word above a number, or no numbers at all.
    """
    first, second = [
        [bool(_NUMBER_OR_MISSING.fullmatch(cell)) for cell in line] for line in cells[:2]
    ]
    words_above_numbers = any(b and not a for a, b in zip(first, second, strict=False))
    return words_above_numbers or not any(first)


_NUMBER_OR_MISSING = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*|nan|inf|\?|")


def quoted_cells(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the cells of each record; cells may be quoted."""
    # Python's limit is 128 KiB per cell and holds for the whole process: raise it, never lower it.
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CELL))
    return csv.reader(lines, delimiter=delimiter)


_LONGEST_CELL = (1 << 31) - 1
