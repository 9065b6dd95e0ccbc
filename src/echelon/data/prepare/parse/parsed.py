"""What a block was found to hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare.blocks import Block

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
