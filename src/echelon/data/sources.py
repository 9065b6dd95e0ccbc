"""Samples in memory, and how anything a user brings becomes a source of batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import Subset as TorchSubset

from echelon.core.errors import DataError, TaskError
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.data import column as columns
from echelon.data.datasets import DatasetSource, names, read_all

_CHOICES = (
    "a BatchSource, a mapping of columns (tensors, arrays, Sparse), a torch Dataset or "
    "IterableDataset, anything with __getitem__ and __len__, or the path of a folder of shards"
)


class ColumnSource:
    """Columns held in memory; a gather is one kernel per column and keeps its dtype."""

    chunkable = True

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.columns: Batch = {
            name: columns.as_column(name, column) for name, column in values.items()
        }
        if not self.columns:
            raise DataError("there are no columns")
        self._length = _common_length(self.columns)

    def __len__(self) -> int:
        return self._length

    def gather(self, rows: Tensor) -> Batch:
        return {name: columns.take(column, rows) for name, column in self.columns.items()}


class Subset:
    """Some rows of another source, in an order of their own."""

    def __init__(self, source: BatchSource, rows: Tensor) -> None:
        rows = torch.as_tensor(rows, dtype=torch.int64)
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(source):
            raise DataError(
                f"a subset has rows {int(rows.min())} to {int(rows.max())} of a source "
                f"with {len(source)}"
            )
        self.source = source
        self.rows = rows
        self.chunkable = chunkable(source)

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, rows: Tensor) -> Batch:
        return self.source.gather(self.rows.index_select(0, rows))


def chunkable(source: BatchSource) -> bool:
    """Whether gathering two batches at once gives the same as one after the other.

    A source that pads a batch to its longest sample must not be chunked, so this holds only
    for sources that say so with an attribute `chunkable = True`.
    """
    return bool(getattr(source, "chunkable", False))


def as_source(data: Any) -> BatchSource:
    """Make a source of whatever the user gave; see the message of `TaskError` for the choices."""
    source = _as_source(data)
    if len(source) == 0:
        raise DataError(f"{type(data).__name__} holds no samples")
    return source


def _as_source(data: Any) -> BatchSource:
    if isinstance(data, str | Path):
        # Shards need pyarrow, which columns in memory do not.
        from echelon.data.shards import ShardSource

        return ShardSource(Path(data))
    if isinstance(data, Mapping):
        return ColumnSource(data)
    # A tensor has `gather` too, but means something else by it.
    if isinstance(data, BatchSource) and not isinstance(data, Tensor):
        return data
    if isinstance(data, IterableDataset):
        return ColumnSource(read_all(data))
    if isinstance(data, TorchSubset):
        return Subset(as_source(data.dataset), torch.as_tensor(data.indices))
    if isinstance(getattr(data, "tensors", None), tuple):
        return ColumnSource(dict(zip(names(len(data.tensors)), data.tensors, strict=True)))
    if isinstance(data, Dataset | list) or _is_map_style(data):
        return DatasetSource(data)
    raise TaskError(f"a {type(data).__name__} is not a source of samples: give {_CHOICES}")


def _is_map_style(data: Any) -> bool:
    rows = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return rows and not isinstance(data, Tensor | tuple | bytes) and not hasattr(data, "__array__")


def _common_length(batch: Batch) -> int:
    (first, column), *others = batch.items()
    length = columns.length(column)
    for name, other in others:
        if columns.length(other) != length:
            raise DataError(
                f"columns {first!r} and {name!r} differ in length: {length} and "
                f"{columns.length(other)} samples"
            )
    return length
