"""One shard, gathered from the blocks that have something for it, in flat memory.

Each block's piece is in the order of the shard. So the rows of a stretch of the shard are a stretch
of every piece: those are mapped, put in order together, and written where they belong.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from echelon.data.prepare.columns import Ragged, Sparse, Values, take
from echelon.data.prepare.desk import Desk
from echelon.data.prepare.forms import arrow, joined, part, seen
from echelon.data.prepare.learnt import pack
from echelon.data.prepare.phantom import Layout, Lengths, begin, layout
from echelon.data.prepare.scatter import PLACE, STAGE
from echelon.data.shards.manifest import BLOCK
from echelon.data.shards.schema import Field, Schema, arrow_schema
from echelon.data.shards.statistics import Statistics

if TYPE_CHECKING:
    from echelon.data.prepare.work import Work

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
    aside = Desk.aside(path)
    plan = layout(schema, sizes.lengths)
    with begin(aside, plan) as file:
        fill = _Filling(file.fileno(), schema, plan)
        for window in _windows(desk, schema, pieces, sizes):
            fill.add(window)
            statistics.add(_batch(schema, window))
        os.fsync(file.fileno())
    crc32 = _checksums(aside)
    aside.replace(path)
    stage = desk.stage(f"shards-{split}")
    desk.put(stage / f"{shard:06d}.statistics", pack(statistics.state()))
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
                entries[field.name] += _entries(field, batch.column(field.name))
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


def _entries(field: Field, column: Any) -> int:
    if field.kind == "dense":
        return 0
    offsets = np.frombuffer(column.buffers()[1], np.int64, len(column) + 1)
    return int(offsets[-1] - offsets[0])


def _checksums(path: Path) -> list[int]:
    found = []
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.append(zlib.crc32(block))
    return found
