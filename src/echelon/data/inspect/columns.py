"""Accumulates the profile of each column, batch by batch, while the next batch is read.

`Looking` takes the batches of a part and gives every column to its own `Look`, in a pool of
threads. A `Look` is chosen by the column's Arrow type (`_kind_of`) and uses the sketches of
`echelon.data.inspect.sketches`, so that memory does not grow with the data.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echelon.core.errors import DataError
from echelon.core.hashing import Words, words
from echelon.data.formats.records import MISSING
from echelon.data.inspect.profile import ColumnProfile, Example
from echelon.data.inspect.sketches import SAMPLED, Distinct, Figures, Numbers, Sample, record_keys
from echelon.data.shards.encode import WIDTH, sparse_pairs
from echelon.data.shards.statistics import Moments


class Looking:
    """The columns of a part and a few example records, in constant memory."""

    def __init__(self, examples: int) -> None:
        self.records = 0
        self._looks: dict[str, Look] = {}
        self._examples = _Examples(examples)

    def look(self, batches: Iterable[tuple[str, Any]], told: Callable[[int], None]) -> None:
        """Add batches, each with the name of its file; call `told` with the records read so far."""
        with ThreadPoolExecutor(os.cpu_count(), "echelon-inspect") as pool:
            waiting: list[Future[None]] = []
            try:
                for where, batch in batches:
                    _finish(waiting)
                    told(self.records)
                    if not batch.num_columns:
                        raise DataError(f"{where}: its records have no columns")
                    waiting = list(self._begin(pool, where, _flat(batch)))
                _finish(waiting)
            finally:
                pool.shutdown(cancel_futures=True)

    def _begin(self, pool: ThreadPoolExecutor, where: str, batch: Any) -> Iterator[Future[None]]:
        keys = record_keys(self.records, batch.num_rows)
        first, self.records = self.records, self.records + batch.num_rows
        yield pool.submit(self._examples.add, batch, keys, first)
        for field, column in zip(batch.schema, batch.columns, strict=True):
            yield pool.submit(self._look(where, field, first).add, column, keys)

    def _look(self, where: str, field: Any, first: int) -> Look:
        """Return the `Look` of this column. A column that was all null so far takes any type."""
        kind = _kind_of(field.type)
        known = self._looks.get(field.name)
        if isinstance(known, EmptyLook) and kind is not EmptyLook:
            known = None
        if known is None:
            known = self._looks[field.name] = kind(field)
            known.seen = known.missing = first
        if kind is not EmptyLook and (kind is not type(known) or not known.fits(field)):
            raise DataError(
                f"{where}: column {field.name!r} is of type {field.type}; before it was of type "
                f"{known.type_name()}"
            )
        return known

    def columns(self) -> tuple[ColumnProfile, ...]:
        return tuple(look.profile(self.records) for look in self._looks.values())

    def examples(self) -> tuple[Example, ...]:
        return self._examples.found()

    @property
    def names(self) -> list[str]:
        return list(self._looks)


def _finish(waiting: list[Future[None]]) -> None:
    """Wait for the columns of a batch; raise the first error."""
    for future in waiting:
        future.result()


def _flat(batch: Any) -> Any:
    """Return a batch with nested objects as columns named `outer.inner`."""
    while any(pa.types.is_struct(field.type) for field in batch.schema):
        batch = pa.Table.from_batches([batch]).flatten().combine_chunks().to_batches()[0]
    pairs = [_plain(field, column) for field, column in zip(batch.schema, batch, strict=True)]
    fields, columns = zip(*pairs, strict=True)
    return pa.RecordBatch.from_arrays(list(columns), schema=pa.schema(fields))


def _plain(field: Any, column: Any) -> tuple[Any, Any]:
    """Return a column without dictionaries and views, and with times in µs, as Python has no ns."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
        return _plain(field.with_type(column.type), column)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        wide = pa.large_utf8() if pa.types.is_string_view(kind) else pa.large_binary()
        return field.with_type(wide), column.cast(wide)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        coarse = pa.timestamp("us", kind.tz)
        return field.with_type(coarse), column.cast(coarse, safe=False)
    return field, column


def _kind_of(kind: Any) -> type[Look]:
    types = pa.types
    if types.is_null(kind):
        return EmptyLook
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return NumberLook
    if types.is_decimal(kind) or types.is_duration(kind):
        return NumberLook
    if types.is_string(kind) or types.is_large_string(kind):
        return TextLook
    if types.is_binary(kind) or types.is_large_binary(kind):
        return BytesLook
    if types.is_temporal(kind) and not types.is_interval(kind):
        return TimeLook
    if types.is_list(kind) or types.is_large_list(kind):
        return ListLook
    return _shaped(kind)


def _shaped(kind: Any) -> type[Look]:
    if isinstance(kind, pa.FixedShapeTensorType):
        return TensorLook
    inner = kind.value_type if pa.types.is_fixed_size_list(kind) else None
    if inner is not None and (pa.types.is_integer(inner) or pa.types.is_floating(inner)):
        return TensorLook
    return Look


class _Examples:
    """A few records, sampled evenly from all of them."""

    def __init__(self, size: int) -> None:
        self._sample = Sample(max(1, size))
        self._size = size

    def add(self, batch: Any, keys: Any, first: int) -> None:
        rows = self._sample.chosen(keys)
        if not self._size or not len(rows):
            return
        found = np.empty(len(rows), object)
        for place, row in enumerate(rows.tolist()):
            found[place] = Example(first + row, _values(batch, row))
        self._sample.add(keys[rows], found)

    def found(self) -> tuple[Example, ...]:
        values = self._sample.values()
        return () if values is None else tuple(values)


def _values(batch: Any, row: int) -> dict[str, Any]:
    return {
        name: _value(column.slice(row, 1))
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def _value(cell: Any) -> Any:
    if isinstance(cell.type, pa.FixedShapeTensorType) and not cell.null_count:
        return cell.to_numpy_ndarray()[0].copy()
    return cell[0].as_py()


# Columns of single numbers, texts or times


class Look:
    """A column of any other type, of which only nulls are counted; the base of all kinds."""

    kind = "other"

    def __init__(self, field: Any) -> None:
        self.field = field
        self.seen = 0
        self.missing = 0

    def add(self, column: Any, keys: Words) -> None:
        """Add a column of a batch, with the keys of its records."""
        self.seen += len(column)
        if column.null_count:
            self.missing += column.null_count
            keys = keys[column.is_valid().to_numpy(zero_copy_only=False)]
            column = column.drop_null()
        if len(column):
            self._take(column, keys)

    def fits(self, field: Any) -> bool:  # noqa: ARG002
        """Return whether a field of the same kind can continue this column."""
        return True

    def profile(self, records: int) -> ColumnProfile:
        """Return the profile; records of files without the column count as missing."""
        missing = self.missing + records - self.seen
        return ColumnProfile(
            self.field.name, self.kind, self.type_name(), records, missing, **self._found()
        )

    def type_name(self) -> str:
        return str(self.field.type)

    def _take(self, column: Any, keys: Words) -> None:
        """Add values without nulls."""

    def _found(self) -> dict[str, Any]:
        return {}


class EmptyLook(Look):
    """A column of nulls only."""

    kind = "empty"


class NumberLook(Look):
    kind = "number"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self._numbers = Numbers()
        self._kind = _counted_as(field.type)
        self._distinct = Distinct(self._kind)

    def fits(self, field: Any) -> bool:
        return bool(pa.types.is_boolean(field.type) == pa.types.is_boolean(self._kind))

    def _take(self, column: Any, keys: Words) -> None:
        if column.type != self._kind:  # another file may have another type of numbers
            if pa.types.is_floating(column.type) and pa.types.is_integer(self._kind):
                self._kind = self._distinct.kind = pa.float64()
            column = column.cast(self._kind, safe=False)
        values = column.to_numpy(zero_copy_only=False)
        if values.dtype.kind == "f" and np.isnan(values).any():
            there = ~np.isnan(values)
            self.missing += len(values) - int(there.sum())
            values, keys = values[there], keys[there]
            column = pa.array(values)
        self._distinct.add(column)
        self._numbers.add(values.view(np.uint8) if values.dtype == bool else values, keys)

    def _found(self) -> dict[str, Any]:
        return {"numbers": self._numbers.figures(), **counted(self._distinct)}


def _counted_as(kind: Any) -> Any:
    """Return a type of numbers that all kernels support."""
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_decimal(kind):
        return pa.float64()
    return pa.float32() if pa.types.is_float16(kind) else kind


_BLANK = pa.array(MISSING)
_WORDS = 4096
"""Texts whose words are counted; counting words takes longer than everything else."""


class TextLook(Look):
    kind = "text"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self._distinct = Distinct(pa.large_utf8())
        self._lengths = Numbers()
        self._words = Sample(_WORDS)
        self._blank = 0

    def type_name(self) -> str:
        return "string"  # the same for string and large_string

    def _take(self, column: Any, keys: Words) -> None:
        lengths = pc.utf8_length(column).to_numpy()
        self._blank += pc.is_in(column, value_set=_BLANK).true_count
        self._lengths.add(lengths, keys)
        self._distinct.add(column)
        rows = self._words.chosen(keys)
        if len(rows):
            chosen = column if len(rows) == len(column) else column.take(pa.array(rows))
            self._words.add(keys[rows], _words(chosen))

    def _found(self) -> dict[str, Any]:
        return {
            "blank": self._blank,
            "lengths": self._lengths.figures(),
            "words": of_sample(self._words.values(), self.seen - self.missing),
            **counted(self._distinct),
        }


def _words(texts: Any) -> np.ndarray[Any, Any]:
    """Return how many words, separated by spaces, each text has."""
    texts = pc.utf8_trim_whitespace(texts)
    words = pc.list_value_length(pc.utf8_split_whitespace(texts)).to_numpy()
    return np.where(pc.binary_length(texts).to_numpy() == 0, 0, words)


class BytesLook(Look):
    kind = "bytes"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self._distinct = Distinct(pa.large_binary())
        self._lengths = Numbers()

    def _take(self, column: Any, keys: Words) -> None:
        self._lengths.add(pc.binary_length(column).to_numpy(), keys)
        self._distinct.add(column)

    def _found(self) -> dict[str, Any]:
        return {"lengths": self._lengths.figures(), **counted(self._distinct)}


class TimeLook(Look):
    kind = "time"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self._distinct = Distinct(field.type)
        self._ends: list[Any] = []

    def _take(self, column: Any, keys: Words) -> None:  # noqa: ARG002
        if column.type != self.field.type:
            column = column.cast(self.field.type, safe=False)
        self._distinct.add(column)
        ends = pc.min_max(pa.chunked_array([column, *self._ends]))
        self._ends = [pa.array([ends["min"].as_py(), ends["max"].as_py()], column.type)]

    def _found(self) -> dict[str, Any]:
        ends = self._ends[0].to_pylist() if self._ends else None
        span = (str(ends[0]), str(ends[1])) if ends is not None else None
        return {"span": span, **counted(self._distinct)}


def counted(distinct: Distinct) -> dict[str, Any]:
    """Return the number of distinct values, and their counts, the most frequent first."""
    counts = distinct.counts
    return {
        "distinct": distinct.count(),
        "counts": None if counts is None else dict(counts.most_common()),
    }


def of_sample(values: Any, total: int) -> Figures | None:
    """Return the figures of a sample out of `total` values."""
    if values is None:
        return None
    numbers = Numbers(len(values) or 1)
    numbers.add(values, record_keys(0, len(values)))
    figures = numbers.figures()
    return None if figures is None else replace(figures, count=total, zeros=None)


# Columns of several numbers per record


class ListLook(Look):
    """A column of sequences, or of rows of a sparse matrix."""

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        self.kind = "sparse" if sparse_pairs(field.type) else "sequence"
        self._lengths = Numbers()
        self._values = Numbers()
        self._count = 0

    def fits(self, field: Any) -> bool:
        return bool(sparse_pairs(field.type) == (self.kind == "sparse"))

    def type_name(self) -> str:
        if self.kind == "sequence":
            return super().type_name()
        metadata = self.field.metadata or {}
        width = f" of width {int(metadata[WIDTH]):,}" if WIDTH in metadata else ""
        return f"sparse {self.field.type.value_type.field('value').type}{width}"

    def _take(self, column: Any, keys: Words) -> None:
        self._lengths.add(pc.list_value_length(column).to_numpy(), keys)
        values = column.flatten()
        if self.kind == "sparse":
            values = values.field("value")
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            plain = values.drop_null().to_numpy()
            self._values.add(plain, record_keys(self._count, len(plain)))
            self._count += len(plain)

    def _found(self) -> dict[str, Any]:
        return {"lengths": self._lengths.figures(), "numbers": self._values.figures()}


_CHANNELS = 4
_PLACES = 64
"""Numbers sampled from each record of a sample of tensors."""


class TensorLook(Look):
    """A column of vectors, images or other tensors of one shape."""

    kind = "tensor"

    def __init__(self, field: Any) -> None:
        super().__init__(field)
        kind = field.type
        tensor = isinstance(kind, pa.FixedShapeTensorType)
        self._shape = tuple(kind.shape) if tensor else (kind.list_size,)
        self._moments = Moments(self._shape)
        self._size = math.prod(self._shape)
        self._sample = Sample(max(1, SAMPLED // min(self._size, _PLACES)))

    def fits(self, field: Any) -> bool:
        return str(field.type) == str(self.field.type)

    def type_name(self) -> str:
        return f"{self.field.type.value_type} {list(self._shape)}"

    def _take(self, column: Any, keys: Words) -> None:
        rows = self._rows(column)
        self._moments.add(rows)
        chosen = self._sample.chosen(keys)
        self._sample.add(
            keys[chosen], self._some(rows.reshape(len(rows), -1)[chosen], keys[chosen])
        )

    def _rows(self, column: Any) -> np.ndarray[Any, Any]:
        if isinstance(column.type, pa.FixedShapeTensorType):
            found: np.ndarray[Any, Any] = column.to_numpy_ndarray()
            return found
        return np.asarray(column.flatten()).reshape(-1, *self._shape)

    def _some(self, rows: np.ndarray[Any, Any], keys: Words) -> np.ndarray[Any, Any]:
        """Return numbers from random places of each record; each record has its own places."""
        if self._size <= _PLACES:
            return rows.astype(np.float64)
        draws: Words = np.add.outer(keys, np.arange(_PLACES, dtype=np.uint64))
        places = (words(draws, 2) % np.uint64(self._size)).astype(np.int64)
        return np.take_along_axis(rows, places, 1).astype(np.float64)

    def _found(self) -> dict[str, Any]:
        sample = self._sample.values()
        figures = None if sample is None else of_sample(sample[np.isfinite(sample)], 0)
        if figures is not None:
            figures = self._overall(figures)
        return {"numbers": figures, "shape": self._shape, "channels": self._channels()}

    def _channels(self) -> tuple[tuple[float, float], ...] | None:
        if len(self._shape) != 3 or not 1 < self._shape[0] <= _CHANNELS:
            return None
        return tuple(zip(self._moments.mean.tolist(), self._moments.std.tolist(), strict=True))

    def _overall(self, figures: Figures) -> Figures:
        """Return the figures with the moments of all features or channels together."""
        found = self._moments
        count = found.count.sum()
        mean = float((found.count * found.mean).sum() / count)
        spread = (found.squares + found.count * (found.mean - mean) ** 2).sum() / count
        return replace(
            figures,
            count=int(count),
            min=float(found.min.min()),
            mean=mean,
            max=float(found.max.max()),
            std=math.sqrt(spread),
        )
