"""Columns of one type as columns of another; what does not fit is found cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare.blocks import Block
from echelon.data.prepare.parse.parsed import Bad, Parsed, is_utf8, shown, valid

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
    for field in wanted:
        array, misfits = fit(columns[field.name], field.type)
        for row in np.flatnonzero(misfits & ~wrong).tolist():
            value = shown(str(columns[field.name][row].as_py()), _SHOWN)
            reason = f"column {field.name!r} is {value!r}: not of type {field.type}"
            whole = {name: column[row].as_py() for name, column in columns.items()}
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
