"""Taking, splitting and moving columns keeps their dtypes and values."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.core.errors import DataError, TaskError
from echelon.core.types import Batch, Sparse
from echelon.data import batch as batches

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def sparse(*rows: list[int], width: int = 10) -> Sparse:
    """A sparse column with these indices; each value is its index over 10."""
    indices = torch.tensor([index for row in rows for index in row], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    return Sparse(indices, indices / 10, offsets, width)


def rows_of(column: Any) -> list[list[int]]:
    indices, values, offsets, _ = column
    assert torch.equal(values, indices / 10)
    return [indices[a:b].tolist() for a, b in pairwise(offsets)]


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED, *FLOATS], ids=str)
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 2)])
def test_taking_keeps_dtype_and_values(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    column = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    taken = batches.take(column, torch.tensor([4, 0, 4]))
    assert isinstance(taken, torch.Tensor)
    assert taken.dtype == dtype
    assert taken.tolist() == [column[4].tolist(), column[0].tolist(), column[4].tolist()]


def test_sparse_rows_are_taken_without_making_them_dense() -> None:
    column = sparse([1, 2, 3], [], [4], [5, 6], width=10**12)
    taken = batches.take(column, torch.tensor([3, 1, 0, 3, 1]))
    assert isinstance(taken, Sparse)
    assert rows_of(taken) == [[5, 6], [], [1, 2, 3], [5, 6], []]
    assert taken.width == 10**12


def test_sparse_rows_that_are_all_empty() -> None:
    assert rows_of(batches.take(sparse([], [1]), torch.tensor([0, 0]))) == [[], []]


@pytest.mark.parametrize("big_endian", [False, True])
def test_arrays_are_taken_as_they_are(big_endian: bool) -> None:
    array = np.arange(6.0).reshape(3, 2)[::-1]
    column = batches.as_column("x", array.astype(">f8") if big_endian else array)
    assert isinstance(column, torch.Tensor)
    assert column.tolist() == array.tolist()


def test_an_array_is_not_copied() -> None:
    array = np.arange(5)
    column = batches.as_column("x", array)
    array[0] = 7
    assert isinstance(column, torch.Tensor)
    assert column[0] == 7


def test_a_memory_map_is_read_without_a_warning(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(6, 2))
    column = batches.as_column("x", np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert isinstance(column, torch.Tensor)
    assert batches.take(column, torch.tensor([5])).tolist() == [[10, 11]]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([1, 2], "column 'a' is a list: give a tensor, an array or Sparse"),
        (torch.tensor(3), "column 'a' is a single number"),
        (np.array(["x"]), "column 'a' holds <U1: a column is made of numbers"),
        (np.array([object()]), "column 'a' holds object"),
        (sparse([1])._replace(offsets=torch.tensor([0.0])), "offsets must be int64"),
        (sparse([1])._replace(offsets=torch.tensor([1, 1])), "begin at 0 and never fall"),
        (sparse([1])._replace(offsets=torch.tensor([0, 2, 1])), "begin at 0 and never fall"),
        (sparse([1])._replace(offsets=torch.tensor([0, 2])), "offsets end at 2, but there are 1"),
    ],
)
def test_what_is_no_column_is_refused(values: Any, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        batches.as_column("a", values)


def mixed_batch() -> Batch:
    return {"x": torch.arange(10).view(5, 2), "s": sparse([1], [2, 3], [], [4], [5, 6])}


def test_a_batch_knows_its_size_and_bytes() -> None:
    assert batches.size(mixed_batch()) == 5
    assert batches.size({"s": sparse([1], [])}) == 2
    assert batches.nbytes(mixed_batch()) == 80 + 6 * 8 + 6 * 4 + 6 * 8


@pytest.mark.parametrize("sizes", [[5], [2, 2, 1], [1, 1, 1, 1, 1], [0, 4, 0, 1], [2, 3]])
def test_parts_put_together_are_the_whole(sizes: list[int]) -> None:
    whole = mixed_batch()
    parts = batches.split(whole, sizes)
    assert [batches.size(part) for part in parts] == sizes
    assert torch.equal(torch.cat([part["x"] for part in parts]), whole["x"])  # type: ignore[misc, arg-type]
    assert list(chain.from_iterable(rows_of(part["s"]) for part in parts)) == rows_of(whole["s"])


def test_parts_share_the_memory_of_the_whole() -> None:
    whole = {"x": torch.zeros(4)}
    part = batches.split(dict(whole), [2, 2])[1]["x"]
    assert isinstance(part, torch.Tensor)
    part.fill_(1)
    assert whole["x"].tolist() == [0, 0, 1, 1]


def test_a_batch_moves_to_a_device_whole() -> None:
    moved = batches.to_device(mixed_batch(), torch.device("meta"), non_blocking=True)
    assert isinstance(moved["s"], Sparse)
    tensors = [moved["x"], *moved["s"][:3]]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 4  # type: ignore[union-attr]
    assert moved["s"].width == 10


def test_every_tensor_of_a_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning needs a GPU driver, so this test only sees which tensors are asked to be pinned."""
    asked = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.shape)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pinned = batches.pin(mixed_batch())
    assert asked == [(5, 2), (6,), (6,), (6,)]
    assert rows_of(pinned["s"]) == rows_of(mixed_batch()["s"])


def test_a_missing_or_sparse_column_is_named() -> None:
    with pytest.raises(TaskError, match=r"column 'y' is needed and missing \(columns: x, s\)"):
        batches.dense(mixed_batch(), "y")
    with pytest.raises(TaskError, match="column 's' is sparse where a dense one is needed"):
        batches.dense(mixed_batch(), "s")
