"""Data sets that give one sample at a time, in the manner of torch and Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from echelon.core.errors import DataError, TaskError
from echelon.core.types import Batch
from echelon.data.batch import nbytes

Collate = Callable[[list[Any]], Mapping[str, Any]]

LARGEST = 1 << 30
"""An iterable data set may take up this many bytes in memory."""
_TOGETHER = 1024


class DatasetSource:
    """A map-style data set: it has `__getitem__` and `__len__`.

    Samples become columns by `collate`, which may be given: it takes a list of samples and returns
    columns, as the collators of torch and Hugging Face do. A sample costs a call of Python, as with
    any loader; data that fits in memory is quicker as a mapping of columns.

    It is asked by one thread at a time, but not always by the same one, unless `prefetch` is 0.
    """

    chunkable = False  # a collate function may pad a batch to its longest sample

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        if not hasattr(dataset, "__len__"):
            raise TaskError(f"{type(dataset).__name__} has no length: give it a __len__")
        self.dataset = dataset
        self._collate = collate or collated
        self._many = getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, rows: Tensor) -> Batch:
        wanted = rows.tolist()
        get = self.dataset.__getitem__
        samples = self._many(wanted) if self._many else [get(row) for row in wanted]
        return dict(self._collate(samples))


def collated(samples: list[Any]) -> Batch:
    """Columns of a list of samples.

    A mapping keeps its names. A tuple becomes x, y, z0, z1, …; a mapping within it keeps its names.
    Anything else is x.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {name: _stacked(name, [sample[name] for sample in samples]) for name in first}
    if not isinstance(first, tuple | list):
        return {"x": _stacked("x", samples)}
    batch: Batch = {}
    for name, values in zip(names(len(first)), zip(*samples, strict=True), strict=True):
        inner = isinstance(values[0], Mapping)
        batch |= collated(list(values)) if inner else {name: _stacked(name, values)}
    return batch


def names(count: int) -> list[str]:
    """What the parts of a tuple are called."""
    return ["x", "y", *(f"z{extra}" for extra in range(count - 2))][:count]


def read_all(samples: Iterable[Any], limit: int = LARGEST) -> Batch:
    """Read an iterable data set to its end: it has no positions to shuffle or to lease."""
    parts: list[Batch] = []
    taken, remaining = 0, iter(samples)
    while part := list(islice(remaining, _TOGETHER)):
        parts.append(collated(part))
        taken += nbytes(parts[-1])
        if taken > limit:
            raise DataError(
                f"{type(samples).__name__} is larger than {limit >> 20} MiB, or has no end: an "
                f"iterable data set is read into memory. Write it to a folder of shards with "
                f"echelon.data.write_shards and train from that"
            )
    if not parts:
        raise DataError(f"{type(samples).__name__} holds no samples")
    return {name: torch.cat([_dense(part[name]) for part in parts]) for name in parts[0]}


def _dense(column: Any) -> Tensor:
    assert isinstance(column, Tensor)  # collated() makes nothing else
    return column


def _stacked(name: str, values: Sequence[Any]) -> Tensor:
    if isinstance(values[0], list):  # Hugging Face gives vectors as lists; torch would transpose
        values = [torch.as_tensor(value) for value in values]
    try:
        column = default_collate(list(values))
    except (TypeError, RuntimeError, ValueError) as error:
        raise DataError(f"column {name!r} cannot be made into a batch: {_line(error)}") from error
    if not isinstance(column, Tensor):
        kind = type(values[0]).__name__
        raise DataError(f"column {name!r} holds {kind}: turn it into numbers, or leave it out")
    return column


def _line(error: Exception) -> str:
    return str(error).splitlines()[0]
