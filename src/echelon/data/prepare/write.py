"""Features → shards, in flat memory.

A block → all its features, laid out by split and shard, ready to be gathered.

The file of a block has one record batch per shard that gets something of it, its rows in the order
they have there, with their places beside them.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.core.files import crc32_blocks, replacing, write_atomic
from echelon.data.prepare import workdir
from echelon.data.prepare.deal import Mixing
from echelon.data.prepare.passes import Rows, columns_of, left, planned
from echelon.data.prepare.steps import (
    WEIGHT,
    Array,
    Columns,
    Ragged,
    Sparse,
    Values,
    mask,
    take,
    take_all,
)
from echelon.data.prepare.workdir import Desk, Learnt, pack, unpack
from echelon.data.shards.encode import encode_arrow
from echelon.data.shards.layout import (
    BLOCK,
    DTYPES,
    Field,
    Schema,
    arrow_schema,
    check_names,
    unsupported,
)
from echelon.data.shards.statistics import Statistics

if TYPE_CHECKING:
    from echelon.data.prepare.passes import Work


# --- scatter ---

PLACE = "\x00place"
STAGE = "scatter"


def encode_block(work: Work, number: int) -> Any:
    """Encode it, write it by shards, and say what it has for whom."""
    rows = left(work, len(work.segments), number)
    compared = len(rows.outs)
    plan = unpack(work.desk.path("plan", number, "plan").read_bytes())
    kept, columns = _encoded(work, rows, plan)
    bad = next(workdir.first(rows.outs[compared:]), "")
    desk = work.desk
    write_atomic(desk.path(STAGE, number, "jsonl"), workdir.text_of(rows.outs))
    pairs = [formed(name, *pair) for name, pair in columns.items()]
    fields = tuple(field for field, _ in pairs)
    check_names(fields)
    values = [column for _, column in pairs]
    entries = _entries(plan, kept, work.mixing)
    pieces = _scattered(desk, number, fields, values, entries) if fields else []
    return {
        "file": rows.file,
        "schema": [field.to_json() for field in fields],
        "pieces": pieces,
        "out": workdir.counted(rows.outs),
        "bad": bad,
    }


def _encoded(
    work: Work, rows: Rows, plan: Learnt
) -> tuple[NDArray[np.int64], dict[str, tuple[Values, Any]]]:
    """Which rows are left, and the columns of them that are written, with Arrow's metadata."""
    kept: NDArray[np.int64] = np.arange(rows.batch.num_rows)
    wanted = work.outline.wanted
    columns: Columns = columns_of(rows.batch, wanted) | planned(plan, wanted)
    kept, columns = _without(rows, kept, columns, _gaps(work.recipe.keep, columns), "keep")
    for at, feature in enumerate(work.features):
        if not len(kept):
            break
        known = work.learnt_of("feature", at)
        gone = sorted(feature.refused(columns, known).items())
        kept, columns = _without(rows, kept, columns, gone, f"features.{at} {feature.kind}")
        columns = {**columns, **feature.encode(columns, known)}
    if not len(kept):
        return kept, {}
    written = {name: (columns[name], None) for name in work.outline.written}
    for name in work.recipe.keep:
        written[name] = (columns[name], rows.batch.schema.field(name).metadata)
    if "weight" in plan:
        written[WEIGHT] = (plan["weight"][kept], None)
    return kept, written


def _without(
    rows: Rows,
    kept: NDArray[np.int64],
    columns: Columns,
    gone: list[tuple[int, str]],
    step: str,
) -> tuple[NDArray[np.int64], Columns]:
    """Rows that are left are numbered anew; the quarantine names them as they were."""
    if not gone:
        return kept, columns
    told = [(int(kept[row]), reason) for row, reason in gone]
    rows.outs += workdir.told(rows.place, rows.batch, told, step)
    left_over = np.delete(np.arange(len(kept)), [row for row, _ in gone])
    return kept[left_over], take_all(columns, left_over)


def _gaps(keep: tuple[str, ...], columns: Columns) -> list[tuple[int, str]]:
    """Rows without a value in a column that is kept: null or NaN, alone or in a list."""
    found: dict[int, str] = {}
    for name in keep:
        column: Any = columns[name]
        for row in np.flatnonzero(mask(pc.is_null(column, nan_is_null=True))).tolist():
            found.setdefault(row, f"column {name!r} has no value")
        for row in _with_gaps_within(column):
            found.setdefault(row, f"column {name!r} has a list in which a value is missing")
    return sorted(found.items())


def _with_gaps_within(column: Any) -> list[int]:
    kind = column.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return []
    there = np.flatnonzero(mask(column.is_valid()))
    column = column.drop_null()
    gaps = pc.is_null(column.flatten(), nan_is_null=True)
    rows = pc.list_parent_indices(column).filter(gaps).unique()
    return [int(row) for row in there[rows.to_numpy()]]


def _entries(plan: Learnt, kept: NDArray[np.int64], mixing: Mixing) -> tuple[NDArray[Any], ...]:
    """Row (of those kept), split, shard and place of everything that is written."""
    now = np.full(len(plan["split"]), -1, np.int64)
    now[kept] = np.arange(len(kept))
    source = plan["row"].astype(np.int64) if "row" in plan else np.arange(len(plan["split"]))
    row, split = now[source], plan["split"][source]
    there = np.flatnonzero(row >= 0)
    split, shard = split[there], plan["shard"][there]
    return row[there], split, shard, mixing.places(split, shard, plan["place"][there])


def _by_place(split: NDArray[Any], shard: NDArray[Any], place: NDArray[Any]) -> NDArray[np.int64]:
    """The order by split, shard and place; no two are the same. Sorting one word takes a third of
    the time of sorting three."""
    places = int(place.max(initial=0)) + 1
    shards = int(shard.max(initial=0)) + 1
    word = (split.astype(np.int64) * shards + shard) * places + place
    return np.argsort(word)


def _scattered(
    desk: Desk,
    number: int,
    fields: Schema,
    values: list[Values],
    entries: tuple[NDArray[Any], ...],
) -> list[tuple[int, int, int]]:
    """Write one batch per shard; (split, shard, rows) of each."""
    order = _by_place(*entries[1:])
    row, split, shard, place = (column[order] for column in entries)
    taken = [take(column, row) for column in values]
    edges = np.flatnonzero((np.diff(split) != 0) | (np.diff(shard) != 0)) + 1
    bounds = [0, *edges.tolist(), len(row)] if len(row) else []
    schema = pa.schema([*(pa.field(f.name, f.arrow_type()) for f in fields), (PLACE, pa.int64())])
    path = desk.path(STAGE, number, "arrow")
    pieces = []
    with (
        replacing(path) as part_file,
        pa.OSFile(str(part_file), "wb") as sink,
        pa.ipc.new_file(sink, schema) as stream,
    ):
        for start, stop in pairwise(bounds):
            arrays = [
                arrow(field, part(column, start, stop))
                for field, column in zip(fields, taken, strict=True)
            ]
            arrays.append(pa.array(place[start:stop]))
            stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
            pieces.append((int(split[start]), int(shard[start]), stop - start))
    return pieces


# --- shard ---
# One shard, gathered from the blocks that have something for it, in flat memory.
#
# Each block's piece is in the order of the shard. So the rows of a stretch of the shard are a
# stretch of every piece: those are mapped, put in order together, and written where they belong.

OUT = "out"
WINDOW = 24 << 20
"""Bytes of a shard that are put in order at a time."""

Piece = tuple[int, int, int]
"""Number of a block, number of its batch, rows."""


def write_shard(work: Work, split: str, shard: int, pieces: Sequence[Piece]) -> Any:
    """Write it; its entry in the manifest comes back, its statistics lie beside it."""
    desk = work.desk
    plain = desk.recall("fields")
    assert plain is not None, "encoded before"
    schema = tuple(Field.from_json(field) for field in plain)
    path = desk.stage(f"{OUT}/{split}") / name_of(shard)
    sizes = _Sizes(desk, schema, pieces)
    statistics = Statistics(schema)
    plan = layout(schema, sizes.lengths)
    with replacing(path, durable=True) as unfinished:
        with begin(unfinished, plan) as file:
            fill = _Filling(file.fileno(), schema, plan)
            for window in _windows(desk, schema, pieces, sizes):
                fill.add(window)
                statistics.add(_batch(schema, window))
        crc32 = crc32_blocks(unfinished, BLOCK)
    stage = desk.stage(f"shards-{split}")
    write_atomic(stage / f"{shard:06d}.statistics", pack(statistics.state()))
    return {"file": path.name, "rows": sizes.rows, "bytes": plan.size, "crc32": crc32}


def name_of(shard: int) -> str:
    return f"shard-{shard:05d}.arrow"


class _Sizes:
    """How much the pieces hold in all."""

    def __init__(self, desk: Desk, schema: Schema, pieces: Sequence[Piece]) -> None:
        self.rows = sum(rows for _, _, rows in pieces)
        self.bytes = self.places = 0
        entries = dict.fromkeys((field.name for field in schema), 0)
        for piece in pieces:
            batch = _opened(desk, piece)
            self.bytes += batch.nbytes
            self.places = max(self.places, batch.column(PLACE)[-1].as_py() + 1)
            for field in schema:
                entries[field.name] += _shard_entries(field, batch.column(field.name))
        self.lengths = {name: Lengths(self.rows, count) for name, count in entries.items()}


def _windows(
    desk: Desk, schema: Schema, pieces: Sequence[Piece], sizes: _Sizes
) -> Iterator[list[Values]]:
    """The columns of one stretch of the shard after the other.

    Files are mapped anew for each: what was mapped for the one before is given back.
    """
    count = min(sizes.places, -(-sizes.bytes // WINDOW))
    bounds = [sizes.places * at // count for at in range(count + 1)]
    for low, high in pairwise(bounds):
        parts: list[list[Values]] = [[] for _ in schema]
        places: list[NDArray[np.int64]] = []
        for piece in pieces:
            batch = _opened(desk, piece)
            place = batch.column(PLACE).to_numpy()
            start, stop = np.searchsorted(place, (low, high)).tolist()
            if start == stop:
                continue
            places.append(place[start:stop])
            for field, found in zip(schema, parts, strict=True):
                found.append(part(seen(field, batch.column(field.name)), start, stop))
        if places:
            order = np.argsort(np.concatenate(places))
            yield [
                take(joined(field, found), order)
                for field, found in zip(schema, parts, strict=True)
            ]


class _Filling:
    """Writes columns to their places in a file, stretch after stretch."""

    def __init__(self, handle: int, schema: Schema, plan: Layout) -> None:
        self._handle = handle
        self._at = {field.name: list(plan.parts[field.name]) for field in schema}
        self._schema = schema
        self._entries = dict.fromkeys(self._at, 0)
        for field in schema:
            if field.kind != "dense":  # offsets begin with a 0, then each row adds its end
                self._write(field.name, 0, np.zeros(1, np.int64))

    def add(self, window: Sequence[Values]) -> None:
        for field, values in zip(self._schema, window, strict=True):
            for at, memory in enumerate(self._memory(field.name, values)):
                self._write(field.name, at, memory)

    def _memory(self, name: str, values: Values) -> Iterator[Any]:
        if isinstance(values, np.ndarray):
            yield values
            return
        if isinstance(values, Ragged | Sparse):
            yield self._shifted(name, values.offsets)
            if isinstance(values, Sparse):
                yield values.indices
            yield values.values
            return
        offsets = np.frombuffer(values.buffers()[1], np.int64, len(values) + 1, values.offset * 8)
        yield self._shifted(name, offsets - offsets[0])
        text = values.buffers()[2]
        empty = np.empty(0, np.uint8)
        yield np.frombuffer(text, np.uint8)[offsets[0] : offsets[-1]] if text else empty

    def _shifted(self, name: str, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        ends = offsets[1:] + self._entries[name]
        self._entries[name] += int(offsets[-1])
        return ends

    def _write(self, name: str, part: int, memory: Any) -> None:
        rest = np.ascontiguousarray(memory).reshape(-1).view(np.uint8).data
        while rest:
            done = os.pwrite(self._handle, rest, self._at[name][part])
            self._at[name][part] += done
            rest = rest[done:]


def _batch(schema: Schema, window: Sequence[Values]) -> Any:
    arrays = [arrow(field, values) for field, values in zip(schema, window, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema))


def _opened(desk: Desk, piece: Piece) -> Any:
    block, number, _ = piece
    with pa.memory_map(str(desk.path(STAGE, block, "arrow"))) as source:
        return pa.ipc.open_file(source).get_batch(number)


def _shard_entries(field: Field, column: Any) -> int:
    if field.kind == "dense":
        return 0
    offsets = np.frombuffer(column.buffers()[1], np.int64, len(column) + 1)
    return int(offsets[-1] - offsets[0])


# --- phantom ---
# Where the memory of a record batch lies in an Arrow file, found without having that memory.
#
# A shard is one record batch, which may be larger than what a worker should hold. So a batch of
# the same lengths is made over memory that is never touched (the kernel gives it none), written to
# nowhere, and what would have been written where is noted. Then the parts are filled in, in any
# order, as they come.


class Lengths(NamedTuple):
    """Of a column: its rows, and the numbers or bytes in all of them, where they differ."""

    rows: int
    entries: int = 0


class Layout(NamedTuple):
    """A file but for its columns: what stands where, and where the parts of each column go."""

    frame: list[tuple[int, bytes]]
    parts: dict[str, list[int]]
    """Column → where its offsets (if it has any) and its numbers begin."""
    size: int


def layout(schema: Schema, lengths: dict[str, Lengths]) -> Layout:
    """The file that a shard of these columns will be."""
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


class _Memory:
    """Spans of address space that nothing is behind."""

    def __init__(self) -> None:
        self._maps: list[Any] = []
        self.addresses: dict[int, int] = {}
        """Address → number of the span."""
        self.parts: dict[str, list[int]] = {}

    def span(self, name: str, count: int, dtype: Any) -> Any:
        size = max(1, count * np.dtype(dtype).itemsize)
        self._maps.append(mmap.mmap(-1, size))
        array = np.frombuffer(self._maps[-1], np.uint8)[: count * np.dtype(dtype).itemsize]
        number = len(self.addresses)
        self.addresses[array.__array_interface__["data"][0]] = number
        self.parts.setdefault(name, []).append(number)
        return array.view(dtype)

    def close(self) -> None:
        """Spans end with what refers to them."""
        self._maps = []


class _Noted(io.RawIOBase):
    """Takes in what is written: columns by their address, the rest as it is."""

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


def _phantom(memory: _Memory, field: Field, lengths: Lengths) -> Any:
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
    offsets[-1] = entries  # how much of the numbers is written depends on it
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


def begin(path: Path, plan: Layout) -> io.FileIO:
    """The file with everything but its columns, open for these."""
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


# --- forms ---
# Columns in the form that shards store them in, and that form seen as plain memory again.

Formed = tuple[Field, Values]


def formed(name: str, values: Values, metadata: Any = None) -> Formed:
    """The field of a column, and its values as they are stored: numbers, or Arrow's text."""
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


def seen(field: Field, column: Any) -> Values:
    """An Arrow column in its stored form as plain memory, without a copy."""
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


def arrow(field: Field, values: Values) -> Any:
    """Values in their stored form as the Arrow column they are stored as."""
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


def joined(field: Field, parts: list[Any]) -> Values:
    """The rows of all parts, one after the other."""
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
    """Consecutive rows, without a copy of their numbers."""
    if isinstance(values, Ragged | Sparse):
        low, high = int(values.offsets[start]), int(values.offsets[stop])
        offsets = values.offsets[start : stop + 1] - low
        if isinstance(values, Ragged):
            return Ragged(values.values[low:high], offsets)
        return Sparse(values.indices[low:high], values.values[low:high], offsets, values.width)
    return values[start:stop]


def _listed(offsets: NDArray[np.int64], values: Any) -> Any:
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def _offsets(column: Any) -> NDArray[np.int64]:
    buffer = column.buffers()[1]
    if buffer is None:
        return np.zeros(1, np.int64)
    return np.frombuffer(buffer, np.int64, len(column) + 1, column.offset * 8)


def _numbers(column: Any, dtype: np.dtype[Any]) -> Array:
    buffer = column.buffers()[1]
    if buffer is None:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, len(column), column.offset * dtype.itemsize)


def _stored(field: Field, values: Array) -> Array:
    return np.ascontiguousarray(values.astype(field.storage, copy=False))


def _dtype(name: str, values: Array) -> str:
    if values.dtype.name not in DTYPES:
        raise unsupported(name, f"of type {values.dtype}", DTYPES)
    return values.dtype.name


def _within(name: str, values: Sparse) -> None:
    if len(values.indices) and not 0 <= values.indices.min() <= values.indices.max() < values.width:
        raise DataError(
            f"column {name!r}: indices run from {values.indices.min()} to {values.indices.max()}, "
            f"outside of width {values.width}"
        )
