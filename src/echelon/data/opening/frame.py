"""A data set as an Arrow table, and the inputs of a model made from its columns: targets, features,
categories.

Everything here comes in pairs: one function fits on the training rows (`Classes.fit`,
`learn_categories`, `stored_figures`), another encodes any rows accordingly (`Classes.encode`,
`category_numbers`, `input_maker`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from echelon.core.errors import DataError, unknown
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.data.batch import dense
from echelon.data.shards.encode import WIDTH, sparse_pairs
from echelon.data.shards.layout import read_manifest
from echelon.data.shards.read import ShardSource
from echelon.data.sources import ColumnSource


@dataclass(frozen=True, slots=True)
class Frame:
    """A table, with its name for error messages."""

    table: Any
    where: str
    stored: Path | None = None
    """The folder of shards, if the table is their memory map."""

    @property
    def names(self) -> list[str]:
        names: list[str] = self.table.column_names
        return names

    def __len__(self) -> int:
        rows: int = self.table.num_rows
        return rows

    def has(self, name: str) -> bool:
        """Return whether the table has this column and it is not all null."""
        return name in self.names and not pa.types.is_null(self.table.column(name).type)

    def column(self, name: str, what: str = "column") -> Any:
        if name not in self.names:
            raise DataError(f"{self.where}: {unknown(what, name, self.names)}")
        return self.table.column(name)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a column of numbers, [N] or [N, …]; missing ones are NaN."""
        column = self.column(name)
        kind = column.type
        if pa.types.is_null(kind):
            return np.full(len(self), np.nan, np.float32)
        if isinstance(kind, pa.FixedShapeTensorType):
            parts = [chunk.to_numpy_ndarray() for chunk in column.chunks]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)
        if sparse_pairs(kind):
            return self._dense_rows(name, column.combine_chunks())
        if (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ):
            return self._vectors(name, column.combine_chunks())
        if pa.types.is_boolean(kind):
            column = column.cast(pa.uint8())
        elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{self.where}: column {name!r} is of type {kind}: not numbers")
        values: np.ndarray[Any, Any] = column.to_numpy()
        return values

    def _dense_rows(self, name: str, column: Any) -> np.ndarray[Any, Any]:
        """Return sparse rows as vectors; refuse rows too large for that."""
        about = self.table.schema.field(name).metadata or {}
        entries, lengths = column.flatten(), column.value_lengths().to_numpy()
        indices = entries.field("index").to_numpy()
        width = max(int(about.get(WIDTH, b"1")), 1 + int(indices.max(initial=0)))
        if len(self) * width > _MOST_NUMBERS:
            raise DataError(
                f"{self.where}: column {name!r} is sparse, {len(self)} rows of {width} numbers: "
                f"make shards of it with `echelon data prepare` (feature `sparse`)"
            )
        dense = np.zeros((len(self), width), np.float32)
        dense[np.repeat(np.arange(len(self)), lengths), indices] = entries.field("value").to_numpy()
        return dense

    def _vectors(self, name: str, column: Any) -> np.ndarray[Any, Any]:
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        odd = np.flatnonzero(lengths != lengths[0])
        if len(odd):
            raise DataError(
                f"{self.where}: column {name!r} has {lengths[0]} numbers in record 0, "
                f"but {lengths[odd[0]]} in record {odd[0]}"
            )
        flat = column.flatten()
        if not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
            raise DataError(f"{self.where}: column {name!r} is of type {column.type}: not numbers")
        values: np.ndarray[Any, Any] = flat.to_numpy(zero_copy_only=False)
        return values.reshape(len(column), -1)


_MOST_NUMBERS = 1 << 28
"""The largest number of values for which sparse rows are made dense."""


# Targets: classes or numbers


def find_target(frame: Frame, name: str | None) -> str:
    """Return the name of the column to predict: `name`, or one of the usual ones."""
    if name is not None:
        frame.column(name, "target column")
        return name
    lower = {column.lower(): column for column in frame.names}
    found = next((lower[usual] for usual in USUAL if usual in lower), None)
    if found is None and frame.names[0] == "column0":
        return "column0"  # a file without column names usually begins with the label
    if found is None:
        raise DataError(
            f"{frame.where}: no column is called {', '.join(USUAL)}; set data.target to one of: "
            f"{', '.join(frame.names)}"
        )
    return found


USUAL = ("label", "target", "y", "class")
"""Usual names of the target column, tried in order if the job does not name one."""


@dataclass(frozen=True, slots=True)
class Classes:
    """The values of a class column, sorted, and the names of the classes."""

    values: list[Any]
    names: list[str]

    @classmethod
    def fit(cls, frame: Frame, target: str, names: Sequence[str] = ()) -> Classes:
        column = _class_column(frame, target)
        values = sorted(pc.unique(column).to_pylist())
        if len(values) < 2:
            raise DataError(f"{frame.where}: target {target!r} has only one class: {values[0]!r}")
        if len(values) > MAX_CLASSES:
            raise DataError(
                f"{frame.where}: target {target!r} has {len(values)} different values: "
                f"at most {MAX_CLASSES} classes are taken"
            )
        named = values == list(range(len(names)))
        return cls(values, list(names) if named else [str(value) for value in values])

    def encode(self, frame: Frame, target: str) -> np.ndarray[Any, Any]:
        """Return the number of each record's class, int64 [N]."""
        column = _class_column(frame, target)
        numbers = pc.index_in(column, pa.array(self.values, column.type, safe=False))
        if numbers.null_count:
            record = _first(numbers.is_null())
            known = ", ".join(str(value) for value in self.values[:20])
            raise DataError(
                f"{frame.where}: record {record}: class {column[record].as_py()!r} of "
                f"{target!r} was not seen in training (known: {known})"
            )
        encoded: np.ndarray[Any, Any] = numbers.to_numpy().astype(np.int64)
        return encoded


MAX_CLASSES = 10_000


def _class_column(frame: Frame, target: str) -> Any:
    column = frame.column(target, "target column")
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if column.null_count:
        record = _first(column.is_null())
        raise DataError(f"{frame.where}: record {record}: target {target!r} is missing")
    if pa.types.is_floating(kind):
        return _whole_numbers(frame, target, column)
    if pa.types.is_integer(kind):
        return column.cast(pa.int64())
    if not (
        pa.types.is_boolean(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    ):
        raise DataError(f"{frame.where}: target {target!r} is of type {kind}: not classes")
    return column


def _whole_numbers(frame: Frame, target: str, column: Any) -> Any:
    values = column.to_numpy()
    fractions = values != np.floor(values)
    if fractions.any():
        record = int(fractions.argmax())
        raise DataError(
            f"{frame.where}: record {record}: target {target!r} is {values[record]}: classes are "
            f"whole numbers or words; a number is for a regression task"
        )
    return column.cast(pa.int64())


def _first(mask: Any) -> int:
    return int(mask.to_numpy().argmax())


def encode_numbers(frame: Frame, target: str) -> np.ndarray[Any, Any]:
    """Return a target of numbers, float32 [N]."""
    values = frame.array(target).astype(np.float32)
    if values.ndim != 1:
        raise DataError(f"{frame.where}: target {target!r} has several numbers per record")
    wrong = ~np.isfinite(values)
    if wrong.any():
        record = int(wrong.argmax())
        raise DataError(
            f"{frame.where}: record {record}: target {target!r} is {values[record]}, not a number"
        )
    return values


# Features: columns of numbers as vectors [D] or images [C, H, W]


def find_features(
    frame: Frame, wanted: Sequence[str] | None, without: Collection[str]
) -> tuple[str, ...]:
    """Return the input columns: those `wanted`, else all columns; never those in `without`."""
    if wanted is not None:
        for name in wanted:
            frame.column(name, "data.columns:")
        return _not_empty(frame, tuple(name for name in wanted if name not in without))
    names = tuple(name for name in frame.names if name not in without)
    if not names:
        raise DataError(f"{frame.where}: has no columns beside {', '.join(without)}")
    return _not_empty(frame, names)


def _not_empty(frame: Frame, names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not frame.has(name):
            raise DataError(
                f"{frame.where}: column {name!r} is empty: leave it out with data.columns"
            )
    return names


def input_maker(
    frame: Frame, features: Sequence[str], mean: Sequence[float] | None = None
) -> Prepare:
    """Return a function that makes `x` of the features; `mean` replaces missing numbers."""
    _only_numbers(frame, features)
    stand_in = None if mean is None else torch.tensor(mean, dtype=torch.float32)

    def prepare(batch: Batch) -> Batch:
        x = as_input({name: dense(batch, name) for name in features}, features)
        return {"x": x if stand_in is None else filled(x, stand_in)}

    return prepare


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


def as_input(columns: Mapping[str, Tensor], features: Sequence[str]) -> Tensor:
    """Return one column of vectors or images as it is, or columns of numbers side by side.

    The result is float32, except images of uint8.
    """
    first = columns[features[0]]
    if len(features) == 1 and first.ndim > 1:
        return _shaped(first)
    return torch.stack([columns[name].to(torch.float32) for name in features], 1)


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


_CHANNELS = (1, 3, 4)
"""Numbers of channels by which an image's channel axis is recognized."""


def filled(x: Tensor, mean: Tensor) -> Tensor:
    """Replace NaN by the mean; return `x` itself if there is none."""
    if not x.is_floating_point():
        return x
    missing = x.isnan()
    if not missing.any():
        return x
    return torch.where(missing, mean.view(-1, 1, 1) if x.ndim == 4 else mean, x)


def prepared(
    frame: Frame,
    columns: Sequence[str],
    prepare: Prepare,
    others: Mapping[str, np.ndarray[Any, Any]],
) -> BatchSource:
    """Return a source of what `prepare` makes of `columns`, together with the columns `others`.

    Shards stay on disk and are prepared batch by batch; a table in memory is prepared once, here.
    """
    if frame.stored is not None:
        stored = ShardSource(frame.stored, columns)
        ready = {name: as_tensor(values) for name, values in others.items()}
        return PreparedSource(stored, prepare, ready)
    arrays: Batch = {name: as_tensor(frame.array(name)) for name in columns}
    return ColumnSource({**prepare(arrays), **others})


Prepare: TypeAlias = Callable[[Batch], Batch]
"""Turn a batch of stored columns into the columns of a model's input."""


class PreparedSource:
    """Batches read from shards and passed through `prepare`, with other columns from memory."""

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


def as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    """Return a tensor without a copy, and without torch's warning about read-only memory."""
    return torch.from_numpy(array) if array.flags.writeable else from_dlpack(array)


def stored_figures(
    frame: Frame, features: Sequence[str], shape: tuple[int, ...]
) -> dict[str, list[float]] | None:
    """Return mean and deviation of one feature from the manifest of its shards, or None.

    That saves a pass over the data.
    """
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


# Categories


def tell_apart(
    frame: Frame, features: Sequence[str], categories: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the features that are numbers, and those that are categories.

    Features named in `categories` are categories of any type.
    """
    for name in categories:
        if name not in features:
            frame.column(name, "data.options.categories:")
    chosen = [n for n in features if n in categories or is_category(frame.column(n).type)]
    return [name for name in features if name not in chosen], chosen


def is_category(kind: Any) -> bool:
    """Return whether columns of this type are categories."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_dictionary(kind)
        or pa.types.is_boolean(kind)
    )


def learn_categories(frame: Frame, name: str, rows: np.ndarray[Any, Any], size: int) -> list[Any]:
    """Return at most `size` values of a field, the most frequent in `rows` first."""
    column = _plain(frame.column(name)).take(pa.array(rows))
    counts = pc.value_counts(column)
    pairs = zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)
    kept = sorted((-count, value) for value, count in pairs if value is not None)
    return [value for _, value in kept[:size]]


def category_numbers(frame: Frame, categories: Mapping[str, Sequence[Any]]) -> Any:
    """Return category numbers, int64 [N, fields]: 1 for the most frequent value, 0 for unseen."""
    columns = [_field_numbers(frame, name, values) for name, values in categories.items()]
    if not columns:
        return np.zeros((len(frame), 0), np.int64)
    return np.stack(columns, 1)


def _field_numbers(frame: Frame, name: str, values: Sequence[Any]) -> np.ndarray[Any, Any]:
    column = _plain(frame.column(name))
    known = pa.array(values)
    if column.type != known.type:
        column = _cast(frame, name, column, known.type)
    found = pc.index_in(column, known)
    numbers: np.ndarray[Any, Any] = pc.add(found, 1).fill_null(0).to_numpy()
    return numbers.astype(np.int64)


def _cast(frame: Frame, name: str, column: Any, kind: Any) -> Any:
    try:
        return column.cast(kind)
    except pa.ArrowException:
        raise DataError(
            f"{frame.where}: column {name!r} is of type {column.type}; in training it was {kind}"
        ) from None


def _plain(column: Any) -> Any:
    """Cast a column to the type that `pa.array` gives plain Python values, so that they compare."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if pa.types.is_large_string(kind):
        return column.cast(pa.string())
    return column.cast(pa.int64()) if pa.types.is_integer(kind) else column
