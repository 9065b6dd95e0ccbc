"""Delimited text → columns, by Arrow's parser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from echelon.data.prepare import scan
from echelon.data.prepare.parse.parsed import all_utf8, empty, is_utf8, one_batch

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
