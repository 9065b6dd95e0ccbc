"""Writes a folder of shards from a stream of batches, in constant memory and atomically.

batches → pending → one Arrow file per shard ─┐
                                              ├ in a folder aside → renamed into place
statistics, checksums → manifest (last) ──────┘
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from echelon.core.errors import DataError
from echelon.core.files import crc32_blocks, fsync, replace_folder, write_atomic
from echelon.data.shards.encode import Values, encode
from echelon.data.shards.layout import (
    BLOCK,
    MANIFEST,
    Manifest,
    Schema,
    ShardEntry,
    same_schema,
)
from echelon.data.shards.statistics import Statistics

TARGET_BYTES = 64 << 20
"""The approximate size of a shard if no number of rows is given."""


def write_shards(
    folder: str | Path,
    batches: Iterable[Mapping[str, Values] | pa.RecordBatch],
    *,
    rows_per_shard: int | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write batches of columns as a folder of shards.

    A column is an array or tensor (dense), a list of arrays (sequences), a `Sparse`, a list of
    strings, or an Arrow array. Nothing appears at `folder` before everything is written.
    """
    if rows_per_shard is not None and rows_per_shard < 1:
        raise DataError(f"rows_per_shard is {rows_per_shard}: it must be at least 1")
    folder = Path(folder)
    _refuse_to_replace(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    aside.mkdir()
    try:
        manifest = _write_all(aside, batches, rows_per_shard)
        replace_folder(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return manifest


def _refuse_to_replace(folder: Path, overwrite: bool) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file; shards need a folder")
    if not any(folder.iterdir()):
        return
    if not (folder / MANIFEST).exists():
        raise DataError(f"{folder}: holds other files; write shards to a folder of their own")
    if not overwrite:
        raise DataError(f"{folder}: holds shards already; say overwrite=True to replace them")


def _write_all(
    aside: Path, batches: Iterable[Mapping[str, Values] | pa.RecordBatch], rows: int | None
) -> Manifest:
    writer: _Writer | None = None
    for number, columns in enumerate(batches):
        schema, batch = encode(columns)
        if writer is None:
            writer = _Writer(aside, schema, rows)
        same_schema(writer.schema, schema, f"batch {number}")
        writer.add(batch)
    if writer is None:
        raise DataError("there is nothing to write: no batches were given")
    manifest = writer.finish()
    write_manifest(aside, manifest)
    return manifest


class _Writer:
    """Collects record batches until they fill a shard."""

    def __init__(self, folder: Path, schema: Schema, rows: int | None) -> None:
        self.schema = schema
        self._folder = folder
        self._rows = rows
        self._pending: list[Any] = []
        self._pending_rows = 0
        self._entries: list[ShardEntry] = []
        self._statistics = Statistics(schema)

    def add(self, batch: Any) -> None:
        if batch.num_rows == 0:
            return
        self._statistics.add(batch)
        if self._rows is None:
            self._rows = max(1, TARGET_BYTES * batch.num_rows // max(1, batch.nbytes))
        start = 0
        while start < batch.num_rows:
            piece = batch.slice(start, self._rows - self._pending_rows)
            self._pending.append(piece)
            self._pending_rows += piece.num_rows
            start += piece.num_rows
            if self._pending_rows == self._rows:
                self._flush()

    def finish(self) -> Manifest:
        if self._pending:
            self._flush()
        if not self._entries:
            raise DataError("there is nothing to write: the batches have no records")
        return Manifest(self.schema, tuple(self._entries), self._statistics.summary())

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._pending).combine_chunks()
        self._pending, self._pending_rows = [], 0
        path = self._folder / f"shard-{len(self._entries):05d}.arrow"
        self._entries.append(write_shard(path, table))


def write_shard(path: Path, table: Any) -> ShardEntry:
    """Write a table of stored columns, each in one chunk, as one shard."""
    with path.open("xb") as file, pa.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=table.num_rows)
    fsync(path)
    size = path.stat().st_size
    return ShardEntry(path.name, table.num_rows, size, tuple(crc32_blocks(path, BLOCK)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the last file of a set; when this returns, the whole set is on disk."""
    write_atomic(folder / MANIFEST, json.dumps(manifest.to_json(), indent=1), durable=True)
    fsync(folder)
