"""Data sets of torch and Hugging Face are read without subclassing a class of Echelon."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from echelon.core.errors import DataError, TaskError
from echelon.data.sources import ColumnSource, DatasetSource, as_source, collated, names, read_all


class Listed:
    """Rows by number, as Hugging Face has them: dictionaries of plain Python values."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return self.rows[row]


class Batched(Listed):
    def __init__(self, *rows: Any) -> None:
        super().__init__(*rows)
        self.asked: list[list[int]] = []

    def __getitems__(self, rows: list[int]) -> list[Any]:
        self.asked.append(rows)
        return [self.rows[row] for row in rows]


class Counting(IterableDataset[tuple[float, int]]):
    def __init__(self, stop: int | None) -> None:
        self.stop = stop

    def __iter__(self) -> Iterator[tuple[float, int]]:
        numbers = itertools.count() if self.stop is None else range(self.stop)
        return ((number / 2, number) for number in numbers)


def plain(batch: Any) -> dict[str, Any]:
    return {name: column.tolist() for name, column in batch.items()}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([1.5, 2.5], {"x": [1.5, 2.5]}),
        ([torch.tensor([1, 2]), torch.tensor([3, 4])], {"x": [[1, 2], [3, 4]]}),
        ([(np.float32(1), 2), (np.float32(3), 4)], {"x": [1, 3], "y": [2, 4]}),
        ([[1, 2, 3, 4]], {"x": [1], "y": [2], "z0": [3], "z1": [4]}),
        ([{"a": 1, "b": [1, 2]}, {"a": 2, "b": [3, 4]}], {"a": [1, 2], "b": [[1, 2], [3, 4]]}),
        ([({"ids": [1, 2], "mask": True}, 7)], {"ids": [[1, 2]], "mask": [True], "y": [7]}),
    ],
)
def test_samples_become_columns(samples: list[Any], expected: dict[str, Any]) -> None:
    assert plain(collated(samples)) == expected


def test_parts_of_a_tuple_have_names() -> None:
    assert [names(count) for count in range(5)] == [
        [],
        ["x"],
        ["x", "y"],
        ["x", "y", "z0"],
        ["x", "y", "z0", "z1"],
    ]


def test_dictionary_rows_keep_their_names() -> None:
    source = as_source(Listed({"ids": [1, 2], "label": 0}, {"ids": [3, 4], "label": 1}))
    batch = source.gather(torch.tensor([1, 0]))
    assert plain(batch) == {"ids": [[3, 4], [1, 2]], "label": [1, 0]}
    assert batch["label"].dtype == torch.int64  # type: ignore[union-attr]


def test_rows_are_asked_for_together_where_that_is_possible() -> None:
    data = Batched((1, 2), (3, 4), (5, 6))
    assert plain(DatasetSource(data).gather(torch.tensor([2, 0]))) == {"x": [5, 1], "y": [6, 2]}
    assert data.asked == [[2, 0]]


def test_a_collate_function_may_be_given() -> None:
    def padded(samples: list[list[int]]) -> dict[str, torch.Tensor]:
        longest = max(map(len, samples))
        return {"x": torch.tensor([s + [0] * (longest - len(s)) for s in samples])}

    source = DatasetSource(Listed([1], [2, 3, 4]), padded)
    assert plain(source.gather(torch.tensor([0, 1]))) == {"x": [[1, 0, 0], [2, 3, 4]]}


@pytest.mark.parametrize(
    ("samples", "complaint"),
    [
        ([{"text": "hello"}], "column 'text' holds str: turn it into numbers, or leave it out"),
        ([{"ids": [1, 2]}, {"ids": [3]}], "column 'ids' cannot be made into a batch: .*equal size"),
        ([(object(), 1)], "column 'x' cannot be made into a batch: "),
    ],
)
def test_values_that_make_no_column_are_named(samples: list[Any], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        collated(samples)


def test_a_data_set_without_a_length_is_refused() -> None:
    class Endless(Dataset[int]):
        def __getitem__(self, row: int) -> int:
            return row

    with pytest.raises(TaskError, match="Endless has no length: give it a __len__"):
        as_source(Endless())


def test_an_iterable_data_set_is_read_into_memory() -> None:
    source = as_source(Counting(2500))
    assert isinstance(source, ColumnSource)
    assert len(source) == 2500
    batch = source.gather(torch.tensor([2499, 1]))
    assert plain(batch) == {"x": [1249.5, 0.5], "y": [2499, 1]}


def test_an_iterable_data_set_without_an_end_is_refused() -> None:
    with pytest.raises(DataError, match=r"Counting is larger than 1 MiB, or has no end.*shards"):
        read_all(Counting(None), limit=1 << 20)


def test_an_iterable_data_set_without_samples_is_refused() -> None:
    with pytest.raises(DataError, match="Counting holds no samples"):
        as_source(Counting(0))
