"""Write_shards, reshard.

Writing a folder of shards: streaming, in flat memory, and all or nothing.

batches → pending → one Arrow file per shard ─┐
                                              ├ in a folder aside → renamed into place
statistics, checksums → manifest (last) ──────┘
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.core.files import crc32_blocks, fsync, replace_folder, sha256_file, write_atomic
from echelon.data.shards.encode import Values, encode
from echelon.data.shards.layout import (
    BLOCK,
    MANIFEST,
    PREPARED,
    Field,
    Manifest,
    Schema,
    ShardEntry,
    arrow_schema,
    read_facts,
    read_manifest,
    same_schema,
    sealed,
    shard_sets,
)
from echelon.data.shards.read import (
    map_file,
    open_shard,
    record_batch,
    verify_shard,
)
from echelon.data.shards.statistics import Statistics

# --- write ---

TARGET_BYTES = 64 << 20
"""About how large a shard is where no number of rows is asked for."""


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
    """The last file of a set; from then on all of it is on disk."""
    write_atomic(folder / MANIFEST, json.dumps(manifest.to_json(), indent=1), durable=True)
    fsync(folder)


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


# --- reshard ---
# The same records in the same order, in another number of shards.
#
# source shards, checked → slices → one shard after the other ─┐
#                                                              ├ aside → renamed into place
# all other files (what was learnt, the recipe, …) as they are ┘

_REPLACE = "say --overwrite (overwrite=True) to replace"


def reshard(
    folder: str | Path, shards: int, to: str | Path | None = None, *, overwrite: bool = False
) -> dict[str, Manifest]:
    """Write a set, or all parts of a prepared one, anew as so many shards each.

    Without `to` the folder itself is replaced, which wants `overwrite`. Statistics, what was
    learnt and all other files are kept. Source shards are compared with their checksums: a
    damaged one is refused, so no damage gets a checksum that fits it.
    """
    try:
        return _reshard(Path(folder).resolve(), shards, to, overwrite)
    except OSError as error:
        where = error.filename or to or folder
        raise DataError(f"{where}: cannot be written: {error.strerror or error}") from None


def _reshard(
    source: Path, shards: int, to: str | Path | None, overwrite: bool
) -> dict[str, Manifest]:
    sets = {name: (path, read_manifest(path)) for name, path in shard_sets(source).items()}
    for path, manifest in sets.values():
        _check(path, manifest, shards)
    facts = read_facts(source)
    target = source if to is None else Path(to).resolve()
    _refuse_to_replace_shards(source, target, overwrite)
    # Shards are mapped by it. Ctrl-C while it is imported ends the process on the spot, and would
    # leave behind what had been begun by then.
    import_module("torch")
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        _copy_others(source, [path for path, _ in sets.values()], aside)
        made = {
            name: _write_set(path, manifest, shards, aside / name)
            for name, (path, manifest) in sets.items()
        }
        if facts is not None:
            _describe(aside, facts, made, shards)
        replace_folder(aside, target)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return made


def _check(path: Path, manifest: Manifest, shards: int) -> None:
    if shards < 1:
        raise DataError(f"shards is {shards}: it must be at least 1")
    if shards > manifest.rows:
        raise DataError(
            f"{path}: {manifest.rows} records cannot be cut into {shards} shards: each needs one"
        )


def _refuse_to_replace_shards(source: Path, target: Path, overwrite: bool) -> None:
    if target == source:
        if not overwrite:
            raise DataError(f"{source}: name another folder, or {_REPLACE} this one")
        return
    if source in target.parents or target in source.parents:
        raise DataError(f"{target}: lies within {source}, or the other way round; choose another")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        shard_sets(target)
    except DataError:
        raise DataError(f"{target}: holds other files; choose a folder of its own") from None
    if not overwrite:
        raise DataError(f"{target}: holds shards already; {_REPLACE} them")


def _copy_others(source: Path, sets: list[Path], aside: Path) -> None:
    """All that is no shard, as it is."""

    def shards(folder: str, names: list[str]) -> set[str]:
        if Path(folder) not in sets:
            return set()
        return {MANIFEST, *(entry.file for entry in read_manifest(folder).shards)} & set(names)

    shutil.copytree(source, aside, ignore=shards, symlinks=True)


def _describe(folder: Path, facts: dict[str, Any], made: dict[str, Manifest], shards: int) -> None:
    """What the preparation told of its shards is told of the new ones."""
    for name, manifest in made.items():
        facts.setdefault("splits", {})[name] = {
            "rows": manifest.rows,
            "shards": len(manifest.shards),
            "bytes": manifest.bytes,
        }
        facts["checksums"][f"{name}/{MANIFEST}"] = sha256_file(folder / name / MANIFEST)
    # Another digest: to prepare it again by the same recipe would give other shards.
    facts["digest"] = f"{facts.get('digest')}, {shards} shards"
    (folder / PREPARED).unlink()
    text = json.dumps(sealed(facts), ensure_ascii=False, indent=1)
    write_atomic(folder / PREPARED, text, durable=True)


def _write_set(source: Path, manifest: Manifest, shards: int, folder: Path) -> Manifest:
    entries = []
    with TemporaryDirectory(prefix=".join-", dir=folder) as scratch:
        for number, pieces in enumerate(_cut(source, manifest, shards)):
            place = Path(scratch, str(number))
            place.mkdir()
            entries.append(_write_one(folder, number, pieces, manifest, place))
            shutil.rmtree(place)
    made = Manifest(manifest.schema, tuple(entries), manifest.statistics)
    write_manifest(folder, made)
    return made


def _write_one(
    folder: Path, number: int, pieces: list[Any], manifest: Manifest, scratch: Path
) -> ShardEntry:
    table = joined(pieces, manifest.schema, scratch)
    pieces.clear()
    return write_shard(folder / f"shard-{number:05d}.arrow", table)


def _cut(source: Path, manifest: Manifest, shards: int) -> Iterator[list[Any]]:
    """For each new shard the slices of old ones that it is made of; sizes differ by one at most."""
    batches = _batches(source, manifest)
    batch = next(batches)
    for number in range(shards):
        wanted = manifest.rows // shards + (number < manifest.rows % shards)
        pieces = []
        while wanted:
            if not batch.num_rows:
                batch = next(batches)
            piece = batch.slice(0, wanted)
            pieces.append(piece)
            wanted -= piece.num_rows
            batch = batch.slice(piece.num_rows)
        yield pieces


def _batches(source: Path, manifest: Manifest) -> Iterator[Any]:
    """The stored columns of one shard after the other."""
    firsts = accumulate((shard.rows for shard in manifest.shards), initial=0)
    for entry, first in zip(manifest.shards, firsts, strict=False):
        shard = open_shard(source, manifest, entry, first)
        verify_shard(shard, manifest.block)
        yield record_batch(shard, manifest)


# --- joining ---
# Record batches made one, in flat memory: what is large is put together in files.
#
# A shard is one record batch, whose columns each lie in one piece. A few megabytes are joined in
# memory. Of more, the numbers of every column are written one after the other to a file aside, and
# that file is mapped: the system may drop its pages whenever it wants them for something else.

LIMIT = 64 << 20
"""Bytes that are joined in memory."""


def joined(batches: Sequence[Any], schema: Schema, scratch: Path) -> Any:
    """One table of these batches of stored columns, each column in one piece.

    Files in the folder `scratch` belong to the table: remove them after it.
    """
    if sum(batch.nbytes for batch in batches) <= LIMIT:
        return pa.Table.from_batches(batches).combine_chunks()
    columns = [
        _join(field, [batch.column(field.name) for batch in batches], scratch / str(number))
        for number, field in enumerate(schema)
    ]
    return pa.Table.from_arrays(columns, schema=arrow_schema(schema))


def _join(field: Field, pieces: Sequence[Any], path: Path) -> Any:
    if field.kind == "dense":
        arrays = (p.to_numpy_ndarray() if field.shape else p.to_numpy() for p in pieces)
        numbers = _mapped(path, arrays, field.storage)
        if not field.shape:
            return pa.array(numbers)
        return pa.FixedShapeTensorArray.from_numpy_ndarray(numbers.reshape(-1, *field.shape))
    if field.kind == "string":
        return _strings(pieces, path)
    offsets = pa.array(_offsets([piece.offsets.to_numpy() for piece in pieces]))
    inner = [piece.flatten() for piece in pieces]
    if field.kind == "sequence":
        values = _mapped(path, (numbers.to_numpy() for numbers in inner), field.storage)
        return pa.LargeListArray.from_arrays(offsets, pa.array(values))
    parts = {"index": field.index_storage, "value": field.storage}
    numbers = [
        _mapped(path.with_suffix(f".{name}"), (p.field(name).to_numpy() for p in inner), dtype)
        for name, dtype in parts.items()
    ]
    pairs = pa.StructArray.from_arrays([pa.array(part) for part in numbers], list(parts))
    return pa.LargeListArray.from_arrays(offsets, pairs)


def _strings(pieces: Sequence[Any], path: Path) -> Any:
    bounds = [_bounds(piece) for piece in pieces]
    texts = (
        np.frombuffer(piece.buffers()[2] or b"", np.uint8)[b[0] : b[-1]]
        for piece, b in zip(pieces, bounds, strict=True)
    )
    data = _mapped(path, texts, np.dtype(np.uint8))
    offsets = _offsets(bounds)
    return pa.LargeStringArray.from_buffers(
        len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(data)
    )


def _bounds(piece: Any) -> Any:
    """Where the texts of a piece begin and end in its buffer."""
    return np.frombuffer(piece.buffers()[1], np.int64)[piece.offset : piece.offset + len(piece) + 1]


def _offsets(pieces: Sequence[Any]) -> Any:
    """The offsets of all pieces, one after the other."""
    lengths = np.concatenate([np.diff(piece) for piece in pieces])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _mapped(path: Path, arrays: Iterable[Any], dtype: np.dtype[Any]) -> Any:
    """These numbers in one piece, in a file."""
    with path.open("xb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data)
    size = path.stat().st_size
    return map_file(path, size).view(dtype) if size else np.empty(0, dtype)
