"""Data of every accepted kind becomes a source; anything else is refused with the choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data import Subset as TorchSubset

from echelon.core.errors import DataError, TaskError
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch, Sparse
from echelon.data.shards import ShardSource, write_shards
from echelon.data.sources import ColumnSource, DatasetSource, Subset, as_source, chunkable

ROWS = torch.tensor([3, 0, 2])


class Squares:
    """A source of a user's own, which subclasses nothing."""

    def __len__(self) -> int:
        return 5

    def gather(self, rows: Tensor) -> Batch:
        return {"x": rows * rows}


class Rows(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(row)), row % 2


def gathered(data: Any) -> dict[str, Any]:
    batch = as_source(data).gather(ROWS)
    return {name: column.tolist() for name, column in batch.items()}  # type: ignore[union-attr]


def test_columns_are_gathered_in_the_order_asked_for() -> None:
    data = {"x": torch.arange(8.0).view(4, 2), "y": np.arange(4, dtype=np.int16)}
    source = as_source(data)
    assert isinstance(source, BatchSource)
    assert len(source) == 4
    batch = source.gather(ROWS)
    assert batch["x"].tolist() == [[6, 7], [0, 1], [4, 5]]  # type: ignore[union-attr]
    assert batch["y"].dtype == torch.int16  # type: ignore[union-attr]


def test_a_sparse_column_is_gathered_sparse() -> None:
    column = Sparse(torch.tensor([7, 8, 9]), torch.ones(3), torch.tensor([0, 1, 1, 3]), 10)
    batch = ColumnSource({"x": column}).gather(torch.tensor([2, 0]))
    assert isinstance(batch["x"], Sparse)
    assert batch["x"].indices.tolist() == [8, 9, 7]


def test_gradients_of_a_column_are_left_behind() -> None:
    column = torch.ones(4, requires_grad=True)
    assert not ColumnSource({"x": column}).gather(ROWS)["x"].requires_grad  # type: ignore[union-attr]


def test_a_source_stays_as_it_is() -> None:
    source = Squares()
    assert as_source(source) is source
    assert not chunkable(source), "a source of unknown kind may pad, so it is read batch by batch"


def test_a_tensor_data_set_becomes_columns() -> None:
    data = TensorDataset(torch.arange(4) * 10, torch.arange(4), torch.arange(4) * 2)
    assert isinstance(as_source(data), ColumnSource)
    assert gathered(data) == {"x": [30, 0, 20], "y": [3, 0, 2], "z0": [6, 0, 4]}


def test_a_torch_subset_becomes_a_subset_of_columns() -> None:
    data = TorchSubset(TensorDataset(torch.arange(9)), [8, 7, 6, 5])
    source = as_source(data)
    assert isinstance(source, Subset)
    assert chunkable(source)
    assert gathered(data) == {"x": [5, 8, 6]}


@pytest.mark.parametrize("data", [Rows(), [(torch.full((2,), float(i)), i % 2) for i in range(5)]])
def test_a_map_style_data_set_is_asked_row_by_row(data: Any) -> None:
    assert isinstance(as_source(data), DatasetSource)
    assert not chunkable(as_source(data))
    assert gathered(data) == {"x": [[3, 3], [0, 0], [2, 2]], "y": [1, 0, 0]}


def test_a_folder_of_shards_is_opened(tmp_path: Path) -> None:
    write_shards(tmp_path / "set", [{"x": np.arange(10)}], rows_per_shard=4)
    for path in (tmp_path / "set", str(tmp_path / "set")):
        assert isinstance(as_source(path), ShardSource)
        assert gathered(path) == {"x": [3, 0, 2]}


def test_a_subset_of_a_subset() -> None:
    inner = Subset(Squares(), torch.tensor([4, 2, 0]))
    assert not inner.chunkable
    assert Subset(inner, torch.tensor([1])).gather(torch.tensor([0, 0]))["x"].tolist() == [4, 4]  # type: ignore[union-attr]


@pytest.mark.parametrize("rows", [[0, 5], [-1, 2]])
def test_a_subset_of_rows_that_are_not_there_is_refused(rows: list[int]) -> None:
    with pytest.raises(DataError, match=rf"rows {rows[0]} to {rows[1]} of a source with 5"):
        Subset(Squares(), torch.tensor(rows))


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="'x' and 'y' differ in length: 4 and 3 samples"):
        as_source({"x": torch.zeros(4), "z": torch.zeros(4), "y": torch.zeros(3)})


def test_no_columns_are_refused() -> None:
    with pytest.raises(DataError, match="there are no columns"):
        as_source({})


@pytest.mark.parametrize("data", [{"x": torch.zeros(0, 3)}, []])
def test_no_samples_are_refused(data: Any) -> None:
    with pytest.raises(DataError, match="holds no samples"):
        as_source(data)


@pytest.mark.parametrize("data", [3, torch.zeros(4), np.zeros(4), (1, 2), b"abc", None, object()])
def test_anything_else_is_refused_with_the_choices(data: Any) -> None:
    kind = type(data).__name__
    with pytest.raises(TaskError, match=f"a {kind} is not a source .* a torch Dataset .* shards"):
        as_source(data)
