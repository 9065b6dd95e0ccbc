"""Columns in stored form, and the layout of a shard file."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from echelon.core.errors import DataError
from echelon.data.prepare.column_layout import Lengths, arrow, formed, joined, layout, part, seen
from echelon.data.prepare.steps import Ragged, Sparse, rows, take
from echelon.data.shards.layout import arrow_schema

OFFSETS = np.array([0, 2, 2, 5, 6])


COLUMNS: dict[str, Any] = {
    "number": np.arange(4, dtype=np.float32),
    "flag": np.array([True, False, True, True]),
    "image": np.arange(24, dtype=np.uint8).reshape(4, 2, 3),
    "tokens": Ragged(np.arange(6, dtype=np.int32), OFFSETS),
    "bag": Sparse(np.array([1, 3, 0, 2, 4, 4]), np.ones(6, np.float32), OFFSETS, 5),
    "text": pa.array(["a", "", "ccc", "ü"]),
    "raw": pa.array([1, 2, None, 4], pa.float64()),
}


def plain(values: Any) -> list[Any]:
    """Any column as a list of rows."""
    if isinstance(values, Ragged | Sparse):
        pairs = [values.values] if isinstance(values, Ragged) else [values.indices, values.values]
        spans = pairwise(values.offsets.tolist())
        return [[numbers[low:high].tolist() for numbers in pairs] for low, high in spans]
    return list(values.to_pylist() if isinstance(values, pa.Array) else values.tolist())


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_taken_cut_joined_and_stored(name: str) -> None:
    field, values = formed(name, COLUMNS[name])
    assert rows(values) == 4
    column = arrow(field, values)
    assert column.type == field.arrow_type()
    expected = plain(values)
    assert repr(plain(seen(field, column))) == repr(expected)
    halves = [part(values, 0, 1), part(values, 1, 4)]
    assert repr(plain(joined(field, halves))) == repr(expected)
    chosen = np.array([3, 0, 0, 2])
    assert repr(plain(take(values, chosen))) == repr([expected[at] for at in chosen])
    assert plain(take(values, np.empty(0, np.int64))) == []
    assert repr(plain(seen(field, column.slice(1, 2)))) == repr(expected[1:3])


def test_a_file_is_laid_out_as_arrow_would() -> None:
    """The frame and the places of the columns are those of a file that Arrow writes."""
    pairs = [formed(name, values) for name, values in COLUMNS.items()]
    schema = tuple(field for field, _ in pairs)
    batch = pa.RecordBatch.from_arrays([arrow(*pair) for pair in pairs], arrow_schema(schema).names)
    batch = batch.cast(arrow_schema(schema)) if batch.schema != arrow_schema(schema) else batch
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as stream:
        stream.write_batch(batch)
    whole = sink.getvalue().to_pybytes()
    entries = {"tokens": 6, "bag": 6, "text": 6}
    plan = layout(schema, {field.name: Lengths(4, entries.get(field.name, 0)) for field in schema})
    assert plan.size == len(whole)
    assert all(whole[at : at + len(text)] == text for at, text in plan.frame)
    at = plan.parts["image"][0]
    assert whole[at : at + 24] == bytes(range(24))
    assert np.frombuffer(whole, np.int64, 5, plan.parts["bag"][0]).tolist() == OFFSETS.tolist()


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("x", np.zeros((2, 0)), "its samples are empty"),
        ("x", np.array(["a"]), "of type <U1"),
        ("x", Sparse(np.array([5]), np.ones(1), np.array([0, 1]), 5), "outside of width 5"),
    ],
)
def test_columns_that_no_shard_can_hold_are_refused(name: str, values: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        formed(name, values)
