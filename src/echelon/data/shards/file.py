"""One shard on disk: mapped into memory, checked, and seen as numpy views.

The map is private and its file handle is closed at once, so the number of shards is not bound
by the number of files a process may hold open.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
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
_SHOWN = 5
"""Columns that are named of those that may be damaged."""


@dataclass(frozen=True, slots=True)
class View:
    """The memory of one column.

    A dense column is `items`, one opaque item per record. The others have `offsets` (one more
    than records), `items` (the numbers) and, if sparse, `indices`.
    """

    items: Array
    offsets: Array | None = None
    indices: Array | None = None

    @property
    def is_text(self) -> bool:
        """Texts are not seen as numbers."""
        return self.offsets is None and not len(self.items)


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
    hit: Mapping[str, tuple[int, int]]
    """Columns that have something in the block, and of which records: it may be any of them."""

    @property
    def records(self) -> tuple[int, int]:
        return min(first for first, _ in self.hit.values()), max(
            last for _, last in self.hit.values()
        )

    def __str__(self) -> str:
        alike: dict[tuple[int, int], list[str]] = {}
        for name, records in self.hit.items():
            alike.setdefault(records, []).append(repr(name))
        places = [f"{_named(n)}, records {first}–{last}" for (first, last), n in alike.items()]
        return f"{self.path}: {self.what}; {' or '.join(places)}"


def _named(names: list[str]) -> str:
    if len(names) == 1:
        return f"column {names[0]}"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"one of columns {', '.join(names[:_SHOWN])}{more}"


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
            hit = _located(shard, number * block, (number + 1) * block)
            yield Damage(shard.path, what, hit)


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


def _located(shard: ShardFile, start: int, stop: int) -> dict[str, tuple[int, int]]:
    """The columns that have something in these bytes of the file, and of which records."""
    base = shard.memory.__array_interface__["data"][0]
    stop = min(stop, len(shard.memory))
    found: dict[str, list[int]] = {}
    known = 0
    for name, view in shard.views.items():
        for part in (view.items, view.indices, view.offsets):
            if part is None or not len(part):
                continue
            begin = part.__array_interface__["data"][0] - base
            low, high = max(start - begin, 0), min(stop - begin, part.nbytes)
            if low < high:
                known += high - low
                found.setdefault(name, []).extend(_records(shard, view, part, low, high))
    if known < stop - start:  # nobody knows where texts lie: they may be in the rest
        texts = [name for name, view in shard.views.items() if view.is_text]
        # Nothing of a column, such as the file's own description: all of it may be wrong.
        rest = texts or ([] if found else shard.views)
        found |= {name: [0, shard.entry.rows - 1] for name in rest}
    return {
        name: (shard.first + min(found[name]), shard.first + max(found[name]))
        for name in shard.views
        if name in found
    }


def _records(shard: ShardFile, view: View, part: Array, low: int, high: int) -> tuple[int, int]:
    """The first and the last record of the shard to which bytes of a part of a column belong."""
    first, last = low // part.itemsize, (high - 1) // part.itemsize
    if part is view.offsets:
        first = max(first - 1, 0)  # where a record begins, the one before it ends
    elif view.offsets is not None:
        first, last = np.searchsorted(view.offsets, (first, last), "right") - 1
    return int(first), int(min(last, shard.entry.rows - 1))
