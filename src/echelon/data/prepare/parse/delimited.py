"""csv and tsv: how they are cut, what columns they have, and good blocks at Arrow's speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.data.prepare import scan
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.cutting import Heading, cut_text
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.parse.cells import Table
from echelon.data.prepare.parse.parsed import (
    Bad,
    Parsed,
    all_utf8,
    is_utf8,
    lacking,
    shown,
    whole_block,
)
from echelon.data.prepare.parse.sieve import Sieve
from echelon.data.readers.delimited import check_delimiter, has_header, quoted_cells

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
