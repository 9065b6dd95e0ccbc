"""From cleaned blocks to shards, in flat memory: scatter every block by shard, gather every shard.

    encode_block   features ─▶ scatter/BLOCK.arrow: one record batch ("piece") per shard that gets
                   rows of the block, its rows in the order of their places there
    write_shard    the pieces of all blocks ─▶ out/SPLIT/shard-NUMBER.arrow

Every piece is sorted by place (places of refused records stay empty). So a window of the shard,
places [low, high), is a contiguous stretch of every piece:

    shard      places   0 ─────────── low ────────── high ─────────
    piece of block 0          0 3 7  |  11 12   |   20 …             map these stretches, put their
    piece of block 4          1 2    |  13 15 16|   18 …             rows in order of place, and
    piece of block 9          5      |  14      |   19 …             write them where they belong

A shard is one record batch, which may be larger than a worker should hold. `layout`
(column_layout.py) therefore finds where each column will lie in the file before there is any data,
and `_Filling` writes the windows there. A worker holds about one window, 24 MB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types
from numpy.typing import NDArray

from echelon.core.files import crc32_blocks, replacing, write_atomic
from echelon.data.prepare import workdir
from echelon.data.prepare.column_layout import (
    Layout,
    Lengths,
    arrow,
    begin,
    formed,
    joined,
    layout,
    part,
    seen,
)
from echelon.data.prepare.deal import Mixing
from echelon.data.prepare.passes import Rows, Work, columns_of, left, planned
from echelon.data.prepare.steps import (
    WEIGHT,
    Columns,
    Ragged,
    Sparse,
    Values,
    mask,
    take,
    take_all,
)
from echelon.data.prepare.workdir import Desk, Learnt, pack, unpack
from echelon.data.shards.layout import (
    BLOCK,
    Field,
    Schema,
    arrow_schema,
    check_names,
)
from echelon.data.shards.statistics import Statistics

STAGE = "scatter"
PLACE = "\x00place"
"""The column of a piece that holds each row's place in its shard."""


def encode_block(work: Work, number: int) -> Any:
    """Encode a block and write it as pieces, one per shard; return its schema, pieces and counts.

    A record that a feature refuses, or that lacks a kept value, goes to the quarantine.
    """
    rows = left(work, len(work.segments), number)
    compared = len(rows.outs)
    plan = unpack(work.desk.path("plan", number, "plan").read_bytes())
    kept, columns = _encoded(work, rows, plan)
    bad = workdir.first(rows.outs[compared:])
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
    """Return the rows that are left, and the columns written of them, with Arrow's metadata."""
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
    """Quarantine the rows `gone`; return the rows and columns that are left.

    Rows of `columns` are numbered from 0; `kept` holds their numbers in the block, which the
    quarantine needs to find file and line.
    """
    if not gone:
        return kept, columns
    told = [(int(kept[row]), reason) for row, reason in gone]
    rows.outs += workdir.told(rows.place, rows.batch, told, step)
    left_over = np.delete(np.arange(len(kept)), [row for row, _ in gone])
    return kept[left_over], take_all(columns, left_over)


def _gaps(keep: tuple[str, ...], columns: Columns) -> list[tuple[int, str]]:
    """Return the rows with a null or NaN in a kept column, alone or within a list, and why."""
    found: dict[int, str] = {}
    for name in keep:
        column: Any = columns[name]
        for row in np.flatnonzero(mask(pc.is_null(column, nan_is_null=True))).tolist():
            found.setdefault(row, f"column {name!r} has no value")
        for row in _with_gaps_within(column):
            found.setdefault(row, f"column {name!r} has a list in which a value is missing")
    return sorted(found.items())


def _with_gaps_within(column: Any) -> list[int]:
    """Return the rows with a list in which a value is missing."""
    kind = column.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return []
    there = np.flatnonzero(mask(column.is_valid()))
    column = column.drop_null()
    gaps = pc.is_null(column.flatten(), nan_is_null=True)
    rows = pc.list_parent_indices(column).filter(gaps).unique()
    return [int(row) for row in there[rows.to_numpy()]]


def _entries(plan: Learnt, kept: NDArray[np.int64], mixing: Mixing) -> tuple[NDArray[Any], ...]:
    """Return row (among those kept), split, shard and place of everything that is written.

    Under `balance: resample` a row occurs several times.
    """
    now = np.full(len(plan["split"]), -1, np.int64)
    now[kept] = np.arange(len(kept))
    source = plan["row"].astype(np.int64) if "row" in plan else np.arange(len(plan["split"]))
    row, split = now[source], plan["split"][source]
    there = np.flatnonzero(row >= 0)
    split, shard = split[there], plan["shard"][there]
    return row[there], split, shard, mixing.places(split, shard, plan["place"][there])


def _scattered(
    desk: Desk,
    number: int,
    fields: Schema,
    values: list[Values],
    entries: tuple[NDArray[Any], ...],
) -> list[tuple[int, int, int]]:
    """Write one record batch per shard; return (split, shard, rows) of each."""
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


def _by_place(split: NDArray[Any], shard: NDArray[Any], place: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order by split, shard and place, which is unique.

    Sorting one combined word takes a third of the time of sorting by three keys.
    """
    places = int(place.max(initial=0)) + 1
    shards = int(shard.max(initial=0)) + 1
    word = (split.astype(np.int64) * shards + shard) * places + place
    return np.argsort(word)


# Gathering one shard


OUT = "out"
WINDOW = 24 << 20
"""Bytes of a shard that are put in order at a time; bounds the memory of a worker."""
Piece = tuple[int, int, int]
"""Block, number of the record batch in the block's file, rows."""


def write_shard(work: Work, split: str, shard: int, pieces: Sequence[Piece]) -> Any:
    """Write a shard and its statistics; return its entry for the manifest."""
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
    """The rows, bytes and column lengths of all pieces of a shard together."""

    def __init__(self, desk: Desk, schema: Schema, pieces: Sequence[Piece]) -> None:
        self.rows = sum(rows for _, _, rows in pieces)
        self.bytes = self.places = 0
        entries = dict.fromkeys((field.name for field in schema), 0)
        for piece in pieces:
            batch = _opened(desk, piece)
            self.bytes += batch.nbytes
            self.places = max(self.places, batch.column(PLACE)[-1].as_py() + 1)
            for field in schema:
                entries[field.name] += _entry_count(field, batch.column(field.name))
        self.lengths = {name: Lengths(self.rows, count) for name, count in entries.items()}


def _entry_count(field: Field, column: Any) -> int:
    """Return the bytes of text, or numbers in rows of different lengths, that a column holds."""
    if field.kind == "dense":
        return 0
    offsets = np.frombuffer(column.buffers()[1], np.int64, len(column) + 1)
    return int(offsets[-1] - offsets[0])


def _windows(
    desk: Desk, schema: Schema, pieces: Sequence[Piece], sizes: _Sizes
) -> Iterator[list[Values]]:
    """Yield the columns of one window of the shard after the other, rows in order of place.

    The pieces are mapped again for each window, so that the pages of the one before are released.
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


def _opened(desk: Desk, piece: Piece) -> Any:
    """Return the record batch of a piece, mapped into memory."""
    block, number, _ = piece
    with pa.memory_map(str(desk.path(STAGE, block, "arrow"))) as source:
        return pa.ipc.open_file(source).get_batch(number)


class _Filling:
    """Writes windows of columns to their places in a file, one after the other."""

    def __init__(self, handle: int, schema: Schema, plan: Layout) -> None:
        self._handle = handle
        self._at = {field.name: list(plan.parts[field.name]) for field in schema}
        self._schema = schema
        self._entries = dict.fromkeys(self._at, 0)
        for field in schema:
            if field.kind != "dense":  # offsets begin with 0, then each row adds its end
                self._write(field.name, 0, np.zeros(1, np.int64))

    def add(self, window: Sequence[Values]) -> None:
        for field, values in zip(self._schema, window, strict=True):
            for at, memory in enumerate(self._memory(field.name, values)):
                self._write(field.name, at, memory)

    def _memory(self, name: str, values: Values) -> Iterator[Any]:
        """Yield the buffers of a column in the order in which a file has them."""
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
        """Return the ends of a window's rows, counted from the start of the column."""
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
