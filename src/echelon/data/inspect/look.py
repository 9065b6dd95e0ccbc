"""A stream of record batches, looked at column by column while the next one is being read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.inspect.columns import BytesLook, EmptyLook, Look, NumberLook, TextLook, TimeLook
from echelon.data.inspect.profile import ColumnProfile, Example
from echelon.data.inspect.sample import Sample, record_keys
from echelon.data.inspect.shaped import ListLook, TensorLook


class Looking:
    """All columns of a part, in flat memory whatever its size."""

    def __init__(self, examples: int) -> None:
        self.records = 0
        self._looks: dict[str, Look] = {}
        self._examples = _Examples(examples)

    def look(self, batches: Iterable[tuple[str, Any]], told: Callable[[int], None]) -> None:
        """Take in batches, each with where it comes from; `told` hears of records done."""
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
        """Where this column's values go; what was all missing takes whatever comes."""
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


class _Examples:
    """A few records, evenly out of all of them."""

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


def _flat(batch: Any) -> Any:
    """Objects within objects as columns called `outer.inner`."""
    while any(pa.types.is_struct(field.type) for field in batch.schema):
        batch = pa.Table.from_batches([batch]).flatten().combine_chunks().to_batches()[0]
    pairs = [_plain(field, column) for field, column in zip(batch.schema, batch, strict=True)]
    fields, columns = zip(*pairs, strict=True)
    return pa.RecordBatch.from_arrays(list(columns), schema=pa.schema(fields))


def _plain(field: Any, column: Any) -> tuple[Any, Any]:
    """Without dictionaries and views: values as they are. Python has no nanoseconds."""
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


def _finish(waiting: list[Future[None]]) -> None:
    """Wait for what is under way; its first fault comes out here."""
    for future in waiting:
        future.result()
