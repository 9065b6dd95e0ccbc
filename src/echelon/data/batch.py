"""What can be done to a batch as a whole."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from echelon.core.errors import TaskError
from echelon.core.types import Batch, Sparse
from echelon.data import column as columns


def size(batch: Batch) -> int:
    """How many samples it holds."""
    return columns.length(next(iter(batch.values())))


def dense(batch: Batch, name: str) -> Tensor:
    """A column that must be there and must be dense."""
    column = batch.get(name)
    if column is None:
        raise TaskError(f"column {name!r} is needed and missing (columns: {', '.join(batch)})")
    if isinstance(column, Sparse):
        raise TaskError(f"column {name!r} is sparse where a dense one is needed")
    return column


def nbytes(batch: Batch) -> int:
    return sum(columns.nbytes(column) for column in batch.values())


def split(batch: Batch, sizes: Iterable[int]) -> list[Batch]:
    """Consecutive parts that share the batch's memory."""
    lengths = list(sizes)
    parts: list[Batch] = [{} for _ in lengths]
    # Filling dictionaries column by column takes a third of the time of making them from pairs.
    for name, column in batch.items():
        for part, view in zip(parts, columns.split(column, lengths), strict=True):
            part[name] = view
    return parts


def emptied(batch: Batch) -> Batch:
    """The same columns without a single sample."""
    return split(batch, [0, size(batch)])[0]


def to_device(batch: Batch, device: torch.device, non_blocking: bool = False) -> Batch:
    return {name: columns.to_device(column, device, non_blocking) for name, column in batch.items()}


def pin(batch: Batch) -> Batch:
    """A copy in memory that a GPU can read while the CPU does something else."""
    return {name: columns.pin(column) for name, column in batch.items()}
