"""Writes the same records in the same order as another number of shards.

    source shards, verified → slices → one new shard after the other ─┐
                                                                      ├ aside → renamed into place
    all other files (what was fitted, the recipe, …) as they are ─────┘

A shard is one record batch, whose columns are each contiguous. Small slices (`LIMIT`) are joined in
memory. Of larger ones, the numbers of every column are written one after the other to a file aside,
and that file is mapped: the system may drop its pages whenever it needs the memory.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.core.files import replace_folder, sha256_file, write_atomic
from echelon.data.shards.layout import (
    MANIFEST,
    PREPARED,
    Field,
    Manifest,
    Schema,
    ShardEntry,
    arrow_schema,
    read_facts,
    read_manifest,
    sealed,
    shard_sets,
)
from echelon.data.shards.read import map_file, open_shard, record_batch, verify_shard
from echelon.data.shards.write import write_manifest, write_shard

_REPLACE = "say --overwrite (overwrite=True) to replace"


def reshard(
    folder: str | Path, shards: int, to: str | Path | None = None, *, overwrite: bool = False
) -> dict[str, Manifest]:
    """Rewrite a set, or every split of prepared data, as `shards` shards each.

    Without `to` the folder itself is replaced, which needs `overwrite`. Statistics and all files
    that are not shards are kept. Source shards are compared with their checksums first, because a
    damaged shard would otherwise get a new checksum that matches the damage.
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
    _refuse_to_replace(source, target, overwrite)
    # torch maps the shards. Ctrl-C during its import ends the process at once, so it is imported
    # before there are files to clean up.
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


def _refuse_to_replace(source: Path, target: Path, overwrite: bool) -> None:
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
    """Copy all files that are neither shards nor manifests."""

    def shards(folder: str, names: list[str]) -> set[str]:
        if Path(folder) not in sets:
            return set()
        return {MANIFEST, *(entry.file for entry in read_manifest(folder).shards)} & set(names)

    shutil.copytree(source, aside, ignore=shards, symlinks=True)


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


def _cut(source: Path, manifest: Manifest, shards: int) -> Iterator[list[Any]]:
    """Yield the slices of old shards that make up each new one; sizes differ by at most one."""
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
    """Yield the stored columns of each shard as a record batch, verified."""
    for entry, first in manifest.numbered():
        shard = open_shard(source, manifest, entry, first)
        verify_shard(shard, manifest.block)
        yield record_batch(shard, manifest)


def _write_one(
    folder: Path, number: int, pieces: list[Any], manifest: Manifest, scratch: Path
) -> ShardEntry:
    table = _joined(pieces, manifest.schema, scratch)
    pieces.clear()  # the caller's list, so that the joined slices are not kept while writing
    return write_shard(folder / f"shard-{number:05d}.arrow", table)


def _describe(folder: Path, facts: dict[str, Any], made: dict[str, Manifest], shards: int) -> None:
    """Replace what the description of prepared data says about the shards."""
    for name, manifest in made.items():
        facts.setdefault("splits", {})[name] = {
            "rows": manifest.rows,
            "shards": len(manifest.shards),
            "bytes": manifest.bytes,
        }
        facts["checksums"][f"{name}/{MANIFEST}"] = sha256_file(folder / name / MANIFEST)
    # Another digest, because preparing again with the same recipe would give other shards.
    facts["digest"] = f"{facts.get('digest')}, {shards} shards"
    (folder / PREPARED).unlink()
    text = json.dumps(sealed(facts), ensure_ascii=False, indent=1)
    write_atomic(folder / PREPARED, text, durable=True)


# Joining slices

LIMIT = 64 << 20
"""Slices up to this many bytes are joined in memory."""


def _joined(batches: Sequence[Any], schema: Schema, scratch: Path) -> Any:
    """Return these batches of stored columns as one table whose columns are contiguous.

    The table uses files in the folder `scratch`; remove them when it is no longer needed.
    """
    if sum(batch.nbytes for batch in batches) <= LIMIT:
        return pa.Table.from_batches(batches).combine_chunks()
    columns = [
        _joined_column(
            field, [batch.column(field.name) for batch in batches], scratch / str(number)
        )
        for number, field in enumerate(schema)
    ]
    return pa.Table.from_arrays(columns, schema=arrow_schema(schema))


def _joined_column(field: Field, pieces: Sequence[Any], path: Path) -> Any:
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
    """Return where the texts of a slice begin and end in its buffer."""
    return np.frombuffer(piece.buffers()[1], np.int64)[piece.offset : piece.offset + len(piece) + 1]


def _offsets(pieces: Sequence[Any]) -> Any:
    """Return the offsets of all slices, joined."""
    lengths = np.concatenate([np.diff(piece) for piece in pieces])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _mapped(path: Path, arrays: Iterable[Any], dtype: np.dtype[Any]) -> Any:
    """Return these arrays as one contiguous array, mapped from a file."""
    with path.open("xb") as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data)
    size = path.stat().st_size
    return map_file(path, size).view(dtype) if size else np.empty(0, dtype)
