"""One shard on disk: mapped into memory, checked, and seen as numpy views.

The map is private and its file handle is closed at once, so the number of shards is not bound
by the number of files a process may hold open.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.shards.manifest import Manifest, ShardEntry
from echelon.data.shards.schema import Field, arrow_schema

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class View:
    """The memory of one column.

    A dense column is `items`, one opaque item per record. The others have `offsets` (one more
    than records), `items` (the numbers) and, if sparse, `indices`.
    """

    items: Array
    offsets: Array | None = None
    indices: Array | None = None


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard that is open."""

    path: Path
    entry: ShardEntry
    first: int
    """Number of its first record in the set."""
    memory: Array
    views: dict[str, View]

    @property
    def records(self) -> str:
        return f"records {self.first}–{self.first + self.entry.rows - 1}"


def open_shards(folder: Path, manifest: Manifest) -> list[ShardFile]:
    """All files of a set, each checked as `open_shard` does."""
    firsts = accumulate((shard.rows for shard in manifest.shards), initial=0)
    return [
        open_shard(folder, manifest, entry, first)
        for entry, first in zip(manifest.shards, firsts, strict=False)
    ]


def open_shard(folder: Path, manifest: Manifest, entry: ShardEntry, first: int) -> ShardFile:
    """Map the file and check its size, its Arrow footer, its schema and its count of records."""
    path = folder / entry.file
    shard = ShardFile(path, entry, first, _map(path, entry, first), {})
    batch = record_batch(shard, manifest)
    for field, column in zip(manifest.schema, batch.columns, strict=True):
        if column.null_count:
            raise _foreign(shard, f"column {field.name!r} has missing values")
        shard.views[field.name] = _view(shard, field, column)
    return shard


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that is not as it was written, and the records it may concern."""

    path: Path
    what: str
    first: int
    last: int
    column: str | None = None

    def __str__(self) -> str:
        column = f"column {self.column!r}, " if self.column is not None else ""
        return f"{self.path}: {self.what}; {column}records {self.first}–{self.last}"


def verify_shard(shard: ShardFile, block: int) -> None:
    """Compare every block with its checksum; the first that is wrong is named."""
    for damage in damages(shard, block):
        raise DataError(str(damage))


def damages(shard: ShardFile, block: int) -> Iterator[Damage]:
    """Every block that does not match its checksum."""
    expected = shard.entry.crc32
    for number, crc32 in enumerate(block_checksums(shard.memory, block)):
        if number >= len(expected) or crc32 != expected[number]:
            what = f"corrupt: checksum of block {number} is wrong"
            yield Damage(shard.path, what, *_located(shard, number * block, (number + 1) * block))


def block_checksums(memory: Array, block: int) -> Iterator[int]:
    for start in range(0, len(memory), block):
        yield zlib.crc32(memory[start : start + block].data)


def map_file(path: Path, size: int) -> Array:
    import torch  # on use: who only looks at files does without

    memory = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    memory.flags.writeable = False
    return memory


def _map(path: Path, entry: ShardEntry, first: int) -> Array:
    records = f"it holds records {first}–{first + entry.rows - 1}"
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be opened: {error.strerror}; {records}") from None
    if not path.is_file():
        raise DataError(f"{path}: is not a file; {records}")
    if size != entry.bytes:
        what = "truncated" if size < entry.bytes else "too long"
        raise DataError(f"{path}: {what}: {size} bytes of {entry.bytes}; {records}")
    try:
        return map_file(path, size)
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        raise DataError(f"{path}: cannot be mapped: {line}; {records}") from None


def record_batch(shard: ShardFile, manifest: Manifest) -> Any:
    """The columns as Arrow sees them."""
    try:
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(shard.memory)))
        batches = reader.num_record_batches
        batch = reader.get_batch(0) if batches == 1 else None
        if batch is not None:
            batch.validate()
    except (pa.ArrowException, OSError, ValueError) as error:
        line = str(error).splitlines()[0]
        raise DataError(f"{shard.path}: not a whole Arrow file: {line}; {shard.records}") from None
    if batch is None:
        raise _foreign(shard, f"{batches} record batches instead of 1")
    if not reader.schema.equals(arrow_schema(manifest.schema)):
        raise _foreign(shard, f"its columns are {', '.join(_types(reader.schema))}")
    if batch.num_rows != shard.entry.rows:
        raise _foreign(shard, f"{batch.num_rows} records instead of {shard.entry.rows}")
    return batch


def _types(schema: Any) -> list[str]:
    return [f"{field.name} ({field.type})" for field in schema]


def _foreign(shard: ShardFile, why: str) -> DataError:
    return DataError(f"{shard.path}: does not belong to this set: {why}; {shard.records}")


def _view(shard: ShardFile, field: Field, column: Any) -> View:
    if field.kind == "dense":
        numbers = column.storage.values if field.shape else column
        plain = _buffer(numbers, field.storage, len(numbers))
        return View(plain.view(field.item))
    if field.kind == "string":
        return View(np.empty(0, np.uint8))
    offsets = np.frombuffer(column.buffers()[1], np.int64, len(column) + 1)
    values = column.values
    if offsets[0] != 0 or offsets[-1] != len(values):
        raise DataError(f"{shard.path}: corrupt: offsets of column {field.name!r}; {shard.records}")
    if field.kind == "sequence":
        return View(_buffer(values, field.storage, len(values)), offsets)
    index, value = values.field("index"), values.field("value")
    return View(
        _buffer(value, field.storage, len(value)),
        offsets,
        _buffer(index, field.index_storage, len(index)),
    )


def _buffer(column: Any, dtype: np.dtype[Any], count: int) -> Array:
    buffer = column.buffers()[1]
    return np.empty(0, dtype) if buffer is None else np.frombuffer(buffer, dtype, count)


def _located(shard: ShardFile, start: int, stop: int) -> tuple[int, int, str | None]:
    """The records, and the column, whose memory lies in these bytes of the file."""
    base = shard.memory.__array_interface__["data"][0]
    for name, view in shard.views.items():
        for part in (view.items, view.indices, view.offsets):
            if part is None or not len(part):
                continue
            begin = part.__array_interface__["data"][0] - base
            low, high = max(start - begin, 0), min(stop - begin, part.nbytes)
            if low < high:
                first, last = low // part.itemsize, (high - 1) // part.itemsize
                if view.offsets is not None and part is not view.offsets:
                    first, last = np.searchsorted(view.offsets, (first, last), "right") - 1
                last = min(last, shard.entry.rows - 1)
                return int(shard.first + first), int(shard.first + last), name
    return shard.first, shard.first + shard.entry.rows - 1, None
