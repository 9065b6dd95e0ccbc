"""Columns as shards store them: their conversion to and from plain memory, and their file layout.

    values of a feature ── formed ─▶ Field + stored form ── arrow ─▶ Arrow column
                                     (numpy memory, text) ◀─ seen ──

The stored form is what write.py takes, cuts (`part`), joins and reorders: numpy arrays, `Ragged` or
`Sparse` with the dtypes of shards, or Arrow's text.

`layout` says which bytes of an Arrow file belong to which column, before there are any columns. So
a shard larger than memory can be written piece by piece, as one record batch.
"""

from __future__ import annotations

import io
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare.steps import Array, Ragged, Sparse, Values
from echelon.data.shards.encode import encode_arrow
from echelon.data.shards.layout import DTYPES, Field, Schema, arrow_schema, unsupported


def formed(name: str, values: Values, metadata: Any = None) -> tuple[Field, Values]:
    """Return the field of a column and its values in stored form: numpy memory, or Arrow's text."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if isinstance(values, pa.Array):
        field, column = encode_arrow(pa.field(name, values.type, metadata=metadata), values)
        return field, seen(field, column)
    if isinstance(values, Ragged):
        field = Field(name, "sequence", _dtype(name, values.values))
        return field, Ragged(_stored(field, values.values), values.offsets)
    if isinstance(values, Sparse):
        field = Field(name, "sparse", _dtype(name, values.values), width=values.width)
        _within(name, values)
        indices = np.ascontiguousarray(values.indices, field.index_storage)
        return field, Sparse(indices, _stored(field, values.values), values.offsets, values.width)
    if values.ndim == 0 or 0 in values.shape[1:]:
        raise DataError(f"column {name!r} has shape {list(values.shape)}: its samples are empty")
    field = Field(name, "dense", _dtype(name, values), values.shape[1:])
    return field, _stored(field, values)


def _dtype(name: str, values: Array) -> str:
    if values.dtype.name not in DTYPES:
        raise unsupported(name, f"of type {values.dtype}", DTYPES)
    return values.dtype.name


def _within(name: str, values: Sparse) -> None:
    """Raise DataError if an index is outside of the width."""
    if len(values.indices) and not 0 <= values.indices.min() <= values.indices.max() < values.width:
        raise DataError(
            f"column {name!r}: indices run from {values.indices.min()} to {values.indices.max()}, "
            f"outside of width {values.width}"
        )


def _stored(field: Field, values: Array) -> Array:
    return np.ascontiguousarray(values.astype(field.storage, copy=False))


def seen(field: Field, column: Any) -> Values:
    """Return an Arrow column in stored form as plain memory, without a copy."""
    if field.kind == "string":
        return column
    if field.kind == "dense":
        numbers = column.storage.flatten() if field.shape else column
        return _numbers(numbers, field.storage).reshape(len(column), *field.shape)
    offsets = _offsets(column)
    values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    offsets = offsets - offsets[0]
    if field.kind == "sequence":
        return Ragged(_numbers(values, field.storage), offsets)
    indices = _numbers(values.field("index"), field.index_storage)
    return Sparse(indices, _numbers(values.field("value"), field.storage), offsets, field.width)


def _numbers(column: Any, dtype: np.dtype[Any]) -> Array:
    buffer = column.buffers()[1]
    if buffer is None:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(column), column.offset * dtype.itemsize)


def _offsets(column: Any) -> NDArray[np.int64]:
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int64, len(column) + 1, column.offset * 8)


def arrow(field: Field, values: Values) -> Any:
    """Return values in stored form as the Arrow column that a shard holds."""
    if isinstance(values, Ragged):
        return _listed(values.offsets, pa.array(values.values))
    if isinstance(values, Sparse):
        pairs = pa.StructArray.from_arrays(
            [pa.array(values.indices), pa.array(values.values)], ["index", "value"]
        )
        return _listed(values.offsets, pairs)
    if isinstance(values, np.ndarray):
        if not field.shape:
            return pa.array(values)
        flat = pa.array(values.reshape(-1))
        storage = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(field.shape)))
        return pa.ExtensionArray.from_storage(field.arrow_type(), storage)
    return values


def _listed(offsets: NDArray[np.int64], values: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def joined(field: Field, parts: list[Any]) -> Values:
    """Concatenate the rows of all parts."""
    if field.kind == "string":
        return pa.concat_arrays(parts)
    if field.kind == "dense":
        return np.concatenate(parts)
    bounds = np.cumsum([0, *(len(part.values) for part in parts)])
    offsets = np.concatenate(
        [
            parts[0].offsets,
            *(p.offsets[1:] + b for p, b in zip(parts[1:], bounds[1:], strict=False)),
        ]
    )
    values = np.concatenate([part.values for part in parts])
    if field.kind == "sequence":
        return Ragged(values, offsets)
    return Sparse(np.concatenate([p.indices for p in parts]), values, offsets, field.width)


def part(values: Values, start: int, stop: int) -> Values:
    """Return rows [start, stop), without a copy of their numbers."""
    if isinstance(values, Ragged | Sparse):
        low, high = int(values.offsets[start]), int(values.offsets[stop])
        offsets = values.offsets[start : stop + 1] - low
        if isinstance(values, Ragged):
            return Ragged(values.values[low:high], offsets)
        return Sparse(values.indices[low:high], values.values[low:high], offsets, values.width)
    return values[start:stop]


# Where the columns lie in a file that is yet to be filled


def layout(schema: Schema, lengths: dict[str, Lengths]) -> Layout:
    """Return the layout of the file that holds these columns as one record batch.

    Arrow writes a batch of the given lengths to a file that only notes what would be written where.
    The batch lies over memory that is never touched, but for the last offsets, so the kernel
    provides almost none.
    """
    memory = _Memory()
    try:
        arrays = [_phantom(memory, field, lengths[field.name]) for field in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema))
        noted = _Noted(memory)
        with pa.PythonFile(noted, mode="w") as sink, pa.ipc.new_file(sink, batch.schema) as stream:
            stream.write_batch(batch)
        parts = {name: [noted.found[at] for at in spans] for name, spans in memory.parts.items()}
        return Layout(noted.frame, parts, noted.at)
    finally:
        del arrays, batch
        memory.close()


class Lengths(NamedTuple):
    """The rows of a column and, for rows of different lengths, their numbers or bytes in total."""

    rows: int
    entries: int = 0


class Layout(NamedTuple):
    """An Arrow file without its columns: all other bytes, and where the columns' buffers go."""

    frame: list[tuple[int, bytes]]
    parts: dict[str, list[int]]
    """Column → where its buffers begin: offsets and indices, if it has any, then values."""
    size: int


def _phantom(memory: _Memory, field: Field, lengths: Lengths) -> Any:
    """Return an Arrow column of these lengths over untouched memory."""
    rows, entries = lengths
    if field.kind == "dense":
        count = int(np.prod(field.shape))
        flat = pa.array(memory.span(field.name, rows * count, field.storage))
        if not field.shape:
            return flat
        return pa.ExtensionArray.from_storage(
            field.arrow_type(), pa.FixedSizeListArray.from_arrays(flat, count)
        )
    offsets = memory.span(field.name, rows + 1, np.int64)
    offsets[-1] = entries  # Arrow writes only so many of the values
    if field.kind == "string":
        text = pa.py_buffer(memory.span(field.name, entries, np.uint8))
        return pa.LargeStringArray.from_buffers(rows, pa.py_buffer(offsets), text)
    if field.kind == "sequence":
        values = pa.array(memory.span(field.name, entries, field.storage))
    else:
        indices = pa.array(memory.span(field.name, entries, field.index_storage))
        numbers = pa.array(memory.span(field.name, entries, field.storage))
        values = pa.StructArray.from_arrays([indices, numbers], ["index", "value"])
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


class _Memory:
    """Spans of address space, mapped but not touched, numbered in the order of creation."""

    def __init__(self) -> None:
        self._maps: list[Any] = []
        self.addresses: dict[int, int] = {}
        """Address → number of the span."""
        self.parts: dict[str, list[int]] = {}
        """Column → its spans, in the order of the buffers."""

    def span(self, name: str, count: int, dtype: Any) -> Any:
        size = max(1, count * np.dtype(dtype).itemsize)
        self._maps.append(mmap.mmap(-1, size))
        array = np.frombuffer(self._maps[-1], np.uint8)[: count * np.dtype(dtype).itemsize]
        number = len(self.addresses)
        self.addresses[array.__array_interface__["data"][0]] = number
        self.parts.setdefault(name, []).append(number)
        return array.view(dtype)

    def close(self) -> None:
        """Drop the maps; each is released when no array refers to it."""
        self._maps = []


class _Noted(io.RawIOBase):
    """A file object that notes where columns are written, and keeps all other bytes."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self.at = 0
        self.frame: list[tuple[int, bytes]] = []
        self.found: dict[int, int] = dict.fromkeys(memory.addresses.values(), 0)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def write(self, data: Any) -> int:
        given = memoryview(data)
        address = np.frombuffer(given, np.uint8).__array_interface__["data"][0]
        number = self._memory.addresses.get(address)
        if number is None:
            self.frame.append((self.at, bytes(given)))
        else:
            self.found[number] = self.at
        self.at += given.nbytes
        return given.nbytes


def begin(path: Path, plan: Layout) -> io.FileIO:
    """Create the file with everything except its columns; return it open for writing these."""
    file = io.FileIO(path, "w+")
    try:
        file.truncate(plan.size)
        for at, content in plan.frame:
            file.seek(at)
            file.write(content)
    except BaseException:
        file.close()
        raise
    return file
