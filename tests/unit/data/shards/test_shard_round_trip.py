"""Columns of every kind are read from shards as they were written, in any order of rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import DataError
from echelon.core.types import Sparse
from echelon.data import ShardSource, read, write_shards
from echelon.data.batch import dense
from echelon.data.shards.layout import DTYPES

ROWS = 23


def columns(rows: int = ROWS) -> dict[str, Any]:
    """A dense, a sequence, a sparse and a text column, with different values in each record."""
    lengths = [(7 * row) % 5 for row in range(rows)]
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    total = int(offsets[-1])
    return {
        "x": torch.arange(rows * 6, dtype=torch.float32).view(rows, 2, 3),
        "y": np.arange(rows),
        "words": [np.arange(row, row + length) for row, length in enumerate(lengths)],
        "bag": Sparse(torch.arange(total) % 50, torch.rand(total), offsets, 50),
        "text": [f"text {row} äé中" for row in range(rows)],
    }


def in_batches(whole: dict[str, Any], size: int) -> list[dict[str, Any]]:
    def part(column: Any, low: int, high: int) -> Any:
        if not isinstance(column, Sparse):
            return column[low:high]
        a, b = int(column.offsets[low]), int(column.offsets[high])
        offsets = column.offsets[low : high + 1] - a
        return Sparse(column.indices[a:b], column.values[a:b], offsets, column.width)

    rows = len(whole["y"])
    cuts = [(low, min(low + size, rows)) for low in range(0, rows, size)]
    return [{name: part(column, *cut) for name, column in whole.items()} for cut in cuts]


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, ROWS),
    per_shard=st.none() | st.integers(1, ROWS),
    rows=st.lists(st.integers(0, ROWS - 1), max_size=40),
)
def test_any_rows_come_back_from_any_layout(
    batch: int, per_shard: int | None, rows: list[int]
) -> None:
    whole = columns()
    with tempfile.TemporaryDirectory() as folder:
        write_shards(f"{folder}/set", in_batches(whole, batch), rows_per_shard=per_shard)
        source = ShardSource(f"{folder}/set", verify=True)
        assert len(source) == ROWS
        got = source.gather(torch.tensor(rows, dtype=torch.int64))
        del source
    assert torch.equal(dense(got, "x"), whole["x"][rows])
    assert dense(got, "y").tolist() == rows
    check_sequences(got, [whole["words"][row] for row in rows])
    check_sparse(got["bag"], whole["bag"], rows)
    assert "text" not in got


def check_sequences(got: dict[str, Any], expected: list[Any]) -> None:
    lengths = [len(values) for values in expected]
    assert got["words_length"].tolist() == lengths
    assert got["words"].shape == (len(expected), max(lengths, default=0))
    for row, values in enumerate(expected):
        assert got["words"][row, : len(values)].tolist() == values.tolist()
        assert not got["words"][row, len(values) :].any()


def check_sparse(got: Any, whole: Sparse, rows: list[int]) -> None:
    assert got.width == whole.width
    assert len(got.offsets) == len(rows) + 1
    for place, row in enumerate(rows):
        a, b = got.offsets[place], got.offsets[place + 1]
        c, d = whole.offsets[row], whole.offsets[row + 1]
        assert got.indices[a:b].tolist() == whole.indices[c:d].tolist()
        assert torch.equal(got.values[a:b], whole.values[c:d])


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_kept_to_the_bit(dtype: str, tmp_path: Path) -> None:
    values = torch.arange(-6, 6).to(getattr(torch, dtype)).view(4, 3)
    scalars = values[:, 0].contiguous()
    write_shards(tmp_path / "set", [{"x": values, "s": scalars}], rows_per_shard=3)
    batch = ShardSource(tmp_path / "set").gather(torch.tensor([3, 0]))
    for name, expected in (("x", values), ("s", scalars)):
        got = batch[name]
        assert isinstance(got, torch.Tensor)
        assert got.dtype == getattr(torch, dtype)
        assert got.tolist() == expected[[3, 0]].tolist()


def test_a_wide_sparse_column_keeps_64_bit_indices(tmp_path: Path) -> None:
    wide = Sparse(torch.tensor([2**40]), torch.ones(1), torch.tensor([0, 1]), 2**41)
    write_shards(tmp_path / "set", [{"x": wide}])
    got = ShardSource(tmp_path / "set").gather(torch.tensor([0]))["x"]
    assert isinstance(got, Sparse)
    assert got.indices.tolist() == [2**40]


def test_empty_sequences_do_not_turn_tokens_into_floats(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"x": [[], [1, 2]]}, {"x": [[3], []]}])
    batch = ShardSource(tmp_path / "set").gather(torch.arange(4))
    assert dense(batch, "x").tolist() == [[0, 0], [1, 2], [3, 0], [0, 0]]
    assert dense(batch, "x").dtype == torch.int64


def test_a_batch_of_nothing_has_the_right_shapes(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [columns()], rows_per_shard=5)
    batch = ShardSource(tmp_path / "set").gather(torch.empty(0, dtype=torch.int64))
    assert dense(batch, "x").shape == (0, 2, 3)
    assert dense(batch, "words").shape == (0, 0)
    assert isinstance(batch["bag"], Sparse)
    assert batch["bag"].offsets.tolist() == [0]


def test_shards_read_again_and_written_again_are_the_same(tmp_path: Path) -> None:
    whole = {**columns(), "flag": np.arange(ROWS) % 2 == 0}
    first = write_shards(tmp_path / "a", [whole], rows_per_shard=7)
    second = write_shards(tmp_path / "b", read(tmp_path / "a"), rows_per_shard=7)
    assert (first.schema, first.statistics) == (second.schema, second.statistics)
    assert [shard.rows for shard in first.shards] == [shard.rows for shard in second.shards]
    again = ShardSource(tmp_path / "b").gather(torch.arange(ROWS))
    assert torch.equal(dense(again, "x"), whole["x"])
    check_sparse(again["bag"], whole["bag"], list(range(ROWS)))
    with pytest.raises(DataError, match="column 'txt' is unknown; did you mean 'text'"):
        list(read(tmp_path / "a", columns=["txt"]))
    table = pa.Table.from_batches(list(read(tmp_path / "a", columns=["text", "flag"])))
    assert table.column("text").to_pylist() == whole["text"]
    assert table.column("flag").to_pylist() == whole["flag"].tolist()


def test_bfloat16_is_read_as_the_same_numbers(tmp_path: Path) -> None:
    values = torch.tensor([[1.5, -2.0], [0.0, 3e38]], dtype=torch.bfloat16)
    write_shards(tmp_path / "set", [{"x": values, "s": values[:, 1].contiguous()}])
    (batch,) = read(tmp_path / "set")
    assert batch.column("x").to_numpy_ndarray().tolist() == values.float().tolist()
    assert batch.column("s").to_pylist() == values[:, 1].float().tolist()


def test_only_sources_that_pad_refuse_to_be_chunked(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [columns()])
    assert not ShardSource(tmp_path / "set").chunkable
    assert ShardSource(tmp_path / "set", ["x", "bag"]).chunkable
