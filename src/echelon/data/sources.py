"""Samples in memory, torch data sets and token sequences as sources of batches.

`as_source` turns anything a user passes as data into a `BatchSource`, which gathers the samples at
given rows. Sources in files are in `echelon.data.shards`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch.utils.data import Subset as TorchSubset

from echelon.core.errors import DataError, TaskError
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.data import batch as columns

_CHOICES = (
    "a BatchSource, a mapping of columns (tensors, arrays, Sparse), a torch Dataset or "
    "IterableDataset, anything with __getitem__ and __len__, or the path of a folder of shards"
)


def as_source(data: Any) -> BatchSource:
    """Return the user's data as a source; the message of the `TaskError` lists what is accepted."""
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
    # A tensor also has a `gather`, with another meaning.
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


# Samples in memory


class ColumnSource:
    """Columns in memory. A gather is one kernel per column and keeps its dtype."""

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


class Subset:
    """Some rows of another source, in the order given."""

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
    """Return whether gathering two batches at once gives the same as one after the other.

    A source that pads a batch to its longest sample must not be chunked, so a source has to
    declare an attribute `chunkable = True`.
    """
    return bool(getattr(source, "chunkable", False))


# Data sets that give one sample at a time

Collate = Callable[[list[Any]], Mapping[str, Any]]


class DatasetSource:
    """A map-style data set, with `__getitem__` and `__len__`.

    `collate` takes a list of samples and returns columns, as the collators of torch and Hugging
    Face do; the default is `collated`. Every sample costs a Python call, as with any loader; data
    that fits in memory is faster as a mapping of columns.

    One thread at a time reads the data set, but not always the same one, unless `prefetch` is 0.
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
    """Return a list of samples as columns.

    Samples that are mappings keep their names. Tuples become x, y, z0, z1, …; mappings inside them
    keep their names. Anything else becomes x.
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
    """Return the column names for a tuple of `count` parts."""
    return ["x", "y", *(f"z{extra}" for extra in range(count - 2))][:count]


def _stacked(name: str, values: Sequence[Any]) -> Tensor:
    if isinstance(values[0], list):  # Hugging Face gives vectors as lists; torch would transpose
        values = [torch.as_tensor(value) for value in values]
    try:
        column = default_collate(list(values))
    except (TypeError, RuntimeError, ValueError) as error:
        line = str(error).splitlines()[0]
        raise DataError(f"column {name!r} cannot be made into a batch: {line}") from error
    if not isinstance(column, Tensor):
        kind = type(values[0]).__name__
        raise DataError(f"column {name!r} holds {kind}: turn it into numbers, or leave it out")
    return column


LARGEST = 1 << 30
"""Bytes of memory that an iterable data set may use."""
_TOGETHER = 1024
"""Samples of an iterable data set that are collated at a time."""


def read_all(samples: Iterable[Any], limit: int = LARGEST) -> Batch:
    """Read an iterable data set into memory, because it has no positions to shuffle or to lease."""
    parts: list[Batch] = []
    taken, remaining = 0, iter(samples)
    while part := list(islice(remaining, _TOGETHER)):
        parts.append(collated(part))
        taken += columns.nbytes(parts[-1])
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


class WindowSource:
    """Windows over one long sequence of tokens, for language models.

    Sample i has the `length` tokens from i·stride on as `x`; `y` is `x` shifted by one token. The
    windows are not stored: a gather copies from a strided view of the sequence, once for x and once
    for y. That is 3 to 4 times as fast as indexing with a table of positions, and both copies are
    contiguous.
    """

    chunkable = True

    def __init__(self, tokens: Tensor, length: int, stride: int = 1) -> None:
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise DataError(
                f"tokens must be a vector of whole numbers, not {tokens.dtype} {list(tokens.shape)}"
            )
        if length < 1 or stride < 1:
            raise DataError(f"windows of {length} tokens every {stride}: both must be at least 1")
        if len(tokens) <= length:
            raise DataError(
                f"{len(tokens)} tokens are too few for one window of {length} and its next token"
            )
        tokens = tokens.contiguous()
        self._x = tokens[:-1].unfold(0, length, stride)
        self._y = tokens[1:].unfold(0, length, stride)

    def __len__(self) -> int:
        return len(self._x)

    def gather(self, rows: Tensor) -> Batch:
        rows = rows.to(self._x.device)
        return {
            "x": self._x.index_select(0, rows).to(torch.int64),
            "y": self._y.index_select(0, rows).to(torch.int64),
        }
