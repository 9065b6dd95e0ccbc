"""Columns of numbers as the one input of a model: vectors [D] or images [C, H, W]."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from echelon.core.errors import DataError
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.data.batch import dense
from echelon.data.opening.frames import Frame
from echelon.data.shards.manifest import read_manifest
from echelon.data.shards.source import ShardSource
from echelon.data.sources import ColumnSource

Prepare: TypeAlias = Callable[[Batch], Batch]
_CHANNELS = (1, 3, 4)


def find_features(
    frame: Frame, wanted: Sequence[str] | None, without: Collection[str]
) -> tuple[str, ...]:
    """The columns of the input: those that are wanted, or all but those `without`."""
    if wanted is not None:
        for name in wanted:
            frame.column(name, "data.columns:")
        return _filled_in(frame, tuple(name for name in wanted if name not in without))
    names = tuple(name for name in frame.names if name not in without)
    if not names:
        raise DataError(f"{frame.where}: has no columns beside {', '.join(without)}")
    return _filled_in(frame, names)


def _filled_in(frame: Frame, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not frame.has(name):
            raise DataError(
                f"{frame.where}: column {name!r} is empty: leave it out with data.columns"
            )
    return names


def prepared(
    frame: Frame,
    columns: Sequence[str],
    prepare: Prepare,
    others: Mapping[str, np.ndarray[Any, Any]],
) -> BatchSource:
    """A source of what `prepare` makes of these columns, beside others that are ready.

    What lies in shards stays there and is prepared batch by batch, the rest is so once and for all.
    """
    if frame.stored is not None:
        stored = ShardSource(frame.stored, columns)
        ready = {name: as_tensor(values) for name, values in others.items()}
        return PreparedSource(stored, prepare, ready)
    arrays: Batch = {name: as_tensor(frame.array(name)) for name in columns}
    return ColumnSource({**prepare(arrays), **others})


class PreparedSource:
    """Batches out of shards, changed on their way, beside columns in memory."""

    chunkable = True

    def __init__(self, stored: BatchSource, prepare: Prepare, others: Mapping[str, Tensor]) -> None:
        self._stored = stored
        self._prepare = prepare
        self._others = dict(others)

    def __len__(self) -> int:
        return len(self._stored)

    def gather(self, rows: Tensor) -> Batch:
        batch = self._prepare(self._stored.gather(rows))
        for name, column in self._others.items():
            batch[name] = column.index_select(0, rows)
        return batch


def input_maker(
    frame: Frame, features: Sequence[str], mean: Sequence[float] | None = None
) -> Prepare:
    """How `x` is made of the features; with `mean`, that stands in for missing numbers."""
    _only_numbers(frame, features)
    stand_in = None if mean is None else torch.tensor(mean, dtype=torch.float32)

    def prepare(batch: Batch) -> Batch:
        x = as_input({name: dense(batch, name) for name in features}, features)
        return {"x": x if stand_in is None else filled(x, stand_in)}

    return prepare


def stored_figures(
    frame: Frame, features: Sequence[str], shape: tuple[int, ...]
) -> dict[str, list[float]] | None:
    """Mean and deviation as the manifest has them, where it has just these: a pass is spared."""
    if frame.stored is None or len(features) != 1:
        return None
    manifest = read_manifest(frame.stored)
    (field,) = (field for field in manifest.schema if field.name == features[0])
    if field.shape != shape:
        return None
    known = manifest.statistics[field.name]
    figures = {key: np.atleast_1d(known[key]) for key in ("min", "max", "mean", "std")}
    if any(values.dtype == object for values in figures.values()):
        return None  # a feature without a single value
    std = np.where(figures["max"] > figures["min"], figures["std"], 1.0)
    return {"mean": figures["mean"].astype(float).tolist(), "std": std.astype(float).tolist()}


def filled(x: Tensor, mean: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    missing = x.isnan()
    if not missing.any():
        return x
    return torch.where(missing, mean.view(-1, 1, 1) if x.ndim == 4 else mean, x)


def as_input(columns: Mapping[str, Tensor], features: Sequence[str]) -> Tensor:
    """One shaped column as it is, or single numbers side by side. Only images stay uint8."""
    first = columns[features[0]]
    if len(features) == 1 and first.ndim > 1:
        return _shaped(first)
    return torch.stack([columns[name].to(torch.float32) for name in features], 1)


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Without a copy, and without torch's warning of memory that is read-only."""
    return torch.from_numpy(array) if array.flags.writeable else from_dlpack(array)


def _shaped(values: Tensor) -> Tensor:
    if values.ndim == 3:
        values = values.unsqueeze(1)
    channels_last = (
        values.ndim == 4 and values.shape[3] in _CHANNELS and values.shape[1] not in _CHANNELS
    )
    if channels_last:
        values = values.permute(0, 3, 1, 2).contiguous()
    image = values.ndim == 4 and values.dtype == torch.uint8
    return values if image else values.to(torch.float32)


def _only_numbers(frame: Frame, features: Sequence[str]) -> None:
    for name in features:
        kind = frame.column(name).type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            raise DataError(
                f"{frame.where}: column {name!r} is text, not numbers: leave it out with "
                f"data.columns, or choose a task that takes categories"
            )
        if isinstance(kind, pa.FixedShapeTensorType) and len(features) > 1:
            raise DataError(
                f"{frame.where}: column {name!r} has shape {list(kind.shape)} and cannot stand "
                f"beside others: choose with data.columns"
            )
