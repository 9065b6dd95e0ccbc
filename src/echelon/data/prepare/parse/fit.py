"""Columns of one type as columns of another; what does not fit is found cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare.blocks import Block
from echelon.data.prepare.parse.parsed import Bad, Parsed, shown

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
    return Parsed(batch, lines, sorted([*bad, *found], key=lambda one: one.line))
