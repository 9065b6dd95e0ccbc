"""csv and tsv."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

from echelon.core.errors import DataError
from echelon.data.readers.stream import open_native, open_stream

BLOCK = 32 << 20
"""Bytes parsed at a time; types are inferred from the first of them."""
MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None")
_LONGEST_CELL = (1 << 31) - 1
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*|nan|inf|\?|")
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
    cells = _first_cells(path, delimiter, quote)
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


def _first_cells(path: Path, delimiter: str, quote: bool) -> list[list[str]]:
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
    first, second = [[bool(_NUMBER.fullmatch(cell)) for cell in line] for line in cells[:2]]
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
