"""Reads a folder of shards: as a source of batches, or as Arrow record batches.

A shard is mapped into memory, checked, and seen as numpy views (`ShardFile`, `View`). To gather a
batch, its rows are sorted by shard once; then each column costs one kernel per touched shard, and a
record is copied as one opaque item of any type. A block whose checksum is wrong is reported with
the columns and records it may belong to (`Damage`).

The map is private and its file handle is closed at once, so the number of shards is not limited by
the number of files that a process may keep open.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.core.types import Batch, Sparse
from echelon.data.shards.encode import WIDTH, dense_array
from echelon.data.shards.layout import (
    Field,
    Manifest,
    Schema,
    ShardEntry,
    arrow_schema,
    float32_of_bfloat16,
    length_name,
    read_manifest,
)

if TYPE_CHECKING:
    from torch import Tensor


Array = np.ndarray[Any, Any]


class ShardSource:
    """The samples of a folder of shards, gathered directly from the memory map.

    Sequences are padded with 0 to the longest one of the batch; the column `<name>_length` has
    their lengths. Text columns are left out, because tensors hold no strings.

    Opening checks sizes, Arrow footers and counts. With `verify`, a shard is compared with its
    checksums when it is first used; `verify_shards` checks the whole set at once.
    """

    def __init__(
        self, folder: str | Path, columns: Sequence[str] | None = None, *, verify: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(folder)
        self.schema = _chosen(self.manifest, columns, self.folder)
        self._shards = open_shards(self.folder, self.manifest)
        self._starts = np.array([shard.first for shard in self._shards], np.int64)
        self._unverified = set(map(id, self._shards)) if verify else set[int]()
        # Padding depends on the other samples of a batch: two batches cannot be gathered at once.
        self.chunkable = all(field.kind != "sequence" for field in self.schema)

    def __len__(self) -> int:
        return self.manifest.rows

    def gather(self, rows: Tensor) -> Batch:
        import torch

        wanted = rows.to("cpu", torch.int64).numpy()
        count = len(wanted)
        if count and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(
                f"rows {wanted.min()} to {wanted.max()} were asked of {len(self)} records"
            )
        pieces = plan(self._shards, self._starts, wanted)
        if self._unverified:
            self._verify(pieces)
        batch: Batch = {}
        for field in self.schema:
            _gather_into(batch, field, pieces, count)
        return batch

    def _verify(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if id(piece.shard) in self._unverified:
                verify_shard(piece.shard, self.manifest.block)
                self._unverified.discard(id(piece.shard))


def _chosen(manifest: Manifest, columns: Sequence[str] | None, folder: Path) -> Schema:
    fields = {field.name: field for field in manifest.schema}
    if columns is None:
        columns = [name for name, field in fields.items() if field.kind != "string"]
        if not columns:
            raise DataError(f"{folder}: all columns are text; turn them into numbers first")
    for name in columns:
        if name not in fields:
            raise DataError(f"{folder}: {unknown('column', name, fields)}")
        if fields[name].kind == "string":
            raise DataError(f"{folder}: column {name!r} is text, which is not gathered")
    return tuple(fields[name] for name in columns)


def _gather_into(batch: Batch, field: Field, pieces: Sequence[Piece], count: int) -> None:
    if field.kind == "dense":
        batch[field.name] = gather_dense(field, pieces, count)
    elif field.kind == "sparse":
        batch[field.name] = gather_sparse(field, pieces, count)
    else:
        values, lengths = gather_sequence(field, pieces, count)
        batch[field.name] = values
        batch[length_name(field.name)] = lengths


def verify_shards(folder: str | Path) -> Manifest:
    """Check every byte of a set against its checksums. Raises DataError at the first damage."""
    manifest = read_manifest(folder)
    for shard in open_shards(Path(folder), manifest):
        verify_shard(shard, manifest.block)
    return manifest


# Gathering a batch from many shards


class Piece(NamedTuple):
    """The rows of a batch that lie in one shard."""

    shard: ShardFile
    local: Array
    """Record numbers in the shard."""
    where: Any
    """Their places in the batch: a slice or an array of indices."""


def plan(shards: Sequence[ShardFile], starts: Array, rows: Array) -> list[Piece]:
    """Group rows by shard; `starts` has the first row of each shard."""
    if len(shards) == 1:
        return [Piece(shards[0], rows, slice(None))]
    owner = np.searchsorted(starts, rows, "right") - 1
    local = rows - starts[owner]
    counts = np.bincount(owner, minlength=len(shards))
    touched = np.flatnonzero(counts).tolist()
    cuts = np.cumsum(counts[touched]).tolist()
    spans = list(zip(touched, [0, *cuts], cuts, strict=False))
    if (owner[1:] >= owner[:-1]).all():  # already sorted, as in a pass without shuffling
        return [Piece(shards[n], local[low:high], slice(low, high)) for n, low, high in spans]
    order = np.argsort(owner, kind="stable")
    local = local[order]
    return [Piece(shards[n], local[low:high], order[low:high]) for n, low, high in spans]


_TEMPORARY = 1 << 18
"""Bytes copied at a time where records are copied twice, so that they stay in the cache."""


def gather_dense(field: Field, pieces: Sequence[Piece], count: int) -> Tensor:
    import torch

    flat = torch.empty((count, field.item_bytes), dtype=torch.uint8)
    out = flat.numpy().reshape(-1).view(field.item)
    step = max(1, _TEMPORARY // field.item_bytes)
    for shard, local, where in pieces:
        items = shard.views[field.name].items
        if isinstance(where, slice):
            # Rows are known to be in range; with "clip" numpy needs no buffer to check them.
            items.take(local, out=out[where], mode="clip")
        elif len(local) <= step:
            out[where] = items[local]
        else:
            for low in range(0, len(local), step):
                out[where[low : low + step]] = items[local[low : low + step]]
    return flat.view(field.torch_dtype).view(count, *field.shape)


def gather_sequence(field: Field, pieces: Sequence[Piece], count: int) -> tuple[Tensor, Tensor]:
    """Return sequences padded with 0 to the longest one, [count, L], and their lengths [count]."""
    import torch

    spans = [_spans(field, piece) for piece in pieces]
    lengths = np.empty(count, np.int64)
    for (_, _, where), (_, span) in zip(pieces, spans, strict=True):
        lengths[where] = span
    longest = int(lengths.max(initial=0))
    out = np.zeros((count, longest), field.storage)
    for (shard, _, where), (starts, span) in zip(pieces, spans, strict=True):
        places = np.arange(count)[where]
        values = shard.views[field.name].items
        out.reshape(-1)[ranges(places * longest, span)] = values[ranges(starts, span)]
    return torch.from_numpy(out).view(field.torch_dtype), torch.from_numpy(lengths)


def gather_sparse(field: Field, pieces: Sequence[Piece], count: int) -> Sparse:
    import torch

    spans = [_spans(field, piece) for piece in pieces]
    offsets = np.zeros(count + 1, np.int64)
    for (_, _, where), (_, span) in zip(pieces, spans, strict=True):
        offsets[1:][where] = span
    np.cumsum(offsets, out=offsets)
    indices = np.empty(offsets[-1], np.int64)
    values = np.empty(offsets[-1], field.storage)
    for (shard, _, where), (starts, span) in zip(pieces, spans, strict=True):
        view = shard.views[field.name]
        assert view.indices is not None
        target, origin = ranges(offsets[:-1][where], span), ranges(starts, span)
        indices[target] = view.indices[origin]
        values[target] = view.items[origin]
    numbers = torch.from_numpy(values).view(field.torch_dtype)
    return Sparse(torch.from_numpy(indices), numbers, torch.from_numpy(offsets), field.width)


def _spans(field: Field, piece: Piece) -> tuple[Array, Array]:
    """Return where each record's numbers begin and how many there are, checked."""
    view = piece.shard.views[field.name]
    assert view.offsets is not None
    starts = view.offsets[piece.local]
    lengths = view.offsets[piece.local + 1] - starts
    wrong = (lengths < 0) | (starts < 0) | (starts + lengths > len(view.items))
    if wrong.any():
        record = piece.shard.first + int(piece.local[wrong.argmax()])
        raise DataError(
            f"{piece.shard.path}: corrupt: offsets of column {field.name!r}, record {record}"
        )
    return starts, lengths


def ranges(starts: Array, lengths: Array) -> Array:
    """Return start, start + 1, …, start + length - 1 for each (start, length), concatenated."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


# Opening a shard


@dataclass(frozen=True, slots=True)
class ShardFile:
    """An open shard: its memory and a view per column."""

    path: Path
    entry: ShardEntry
    first: int
    """Number of its first record within the set."""
    memory: Array
    views: dict[str, View]

    @property
    def records(self) -> str:
        return f"records {self.first}–{self.first + self.entry.rows - 1}"


@dataclass(frozen=True, slots=True)
class View:
    """The memory of one column.

    A dense column has only `items`, one opaque item per record. Sequences and sparse columns have
    `offsets` (one more than records), `items` (the numbers) and, if sparse, `indices`.
    """

    items: Array
    offsets: Array | None = None
    indices: Array | None = None

    @property
    def is_text(self) -> bool:
        """Whether this is a text column, which has no view."""
        return self.offsets is None and not len(self.items)


def open_shards(folder: Path, manifest: Manifest) -> list[ShardFile]:
    """Open all shards of a set; see `open_shard` for the checks."""
    return [open_shard(folder, manifest, entry, first) for entry, first in manifest.numbered()]


def open_shard(folder: Path, manifest: Manifest, entry: ShardEntry, first: int) -> ShardFile:
    """Map a shard and check its size, its Arrow footer, its schema and its number of records."""
    path = folder / entry.file
    shard = ShardFile(path, entry, first, _map(path, entry, first), {})
    batch = record_batch(shard, manifest)
    for field, column in zip(manifest.schema, batch.columns, strict=True):
        if column.null_count:
            raise _foreign(shard, f"column {field.name!r} has missing values")
        shard.views[field.name] = _view(shard, field, column)
    return shard


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


def map_file(path: Path, size: int) -> Array:
    import torch  # on use: reading a manifest does not need it

    memory = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()
    memory.flags.writeable = False
    return memory


def record_batch(shard: ShardFile, manifest: Manifest) -> Any:
    """Return the shard's columns as an Arrow record batch in the mapped memory."""
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


# Finding damage

_SHOWN = 5
"""Possibly damaged columns that are named in a message."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A block with a wrong checksum, and the records that may be damaged."""

    path: Path
    what: str
    hit: Mapping[str, tuple[int, int]]
    """The first and last record of each column with bytes in the block."""

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
    """Compare every block with its checksum. Raises DataError at the first that is wrong."""
    for damage in damages(shard, block):
        raise DataError(str(damage))


def damages(shard: ShardFile, block: int) -> Iterator[Damage]:
    """Yield every block that does not match its checksum."""
    expected = shard.entry.crc32
    for number, start in enumerate(range(0, len(shard.memory), block)):
        crc32 = zlib.crc32(shard.memory[start : start + block].data)
        if number >= len(expected) or crc32 != expected[number]:
            what = f"corrupt: checksum of block {number} is wrong"
            hit = _located(shard, start, start + block)
            yield Damage(shard.path, what, hit)


def _located(shard: ShardFile, start: int, stop: int) -> dict[str, tuple[int, int]]:
    """Return the columns with data in these bytes of the file, and its first and last record."""
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
    if known < stop - start:  # the remaining bytes may be texts, which have no view
        texts = [name for name, view in shard.views.items() if view.is_text]
        # No text and no other column: these bytes are Arrow's own metadata, so all may be wrong.
        rest = texts or ([] if found else shard.views)
        found |= {name: [0, shard.entry.rows - 1] for name in rest}
    return {
        name: (shard.first + min(found[name]), shard.first + max(found[name]))
        for name in shard.views
        if name in found
    }


def _records(shard: ShardFile, view: View, part: Array, low: int, high: int) -> tuple[int, int]:
    """Return the first and the last record of the shard with bytes [low, high) of `part`."""
    first, last = low // part.itemsize, (high - 1) // part.itemsize
    if part is view.offsets:
        first = max(first - 1, 0)  # an offset is also the end of the record before it
    elif view.offsets is not None:
        first, last = np.searchsorted(view.offsets, (first, last), "right") - 1
    return int(first), int(min(last, shard.entry.rows - 1))


# Reading a folder as record batches


def read_shards(path: Path, *, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield one record batch per shard; its columns are in the memory map."""
    manifest = read_manifest(path)
    fields = {field.name: field for field in manifest.schema}
    for name in columns or ():
        if name not in fields:
            raise DataError(f"{path}: {unknown('column', name, fields)}")
    chosen = [fields[name] for name in columns or fields]
    for shard in open_shards(path, manifest):
        batch = record_batch(shard, manifest)
        arrays = [_as_read(field, batch.column(field.name)) for field in chosen]
        yield pa.RecordBatch.from_arrays(
            arrays, schema=pa.schema([_field(f, a) for f, a in zip(chosen, arrays, strict=True)])
        )


def _as_read(field: Field, column: Any) -> Any:
    """Return stored booleans as booleans, and bfloat16 as float32."""
    if field.dtype == "bool" and not field.shape and field.kind == "dense":
        return column.cast(pa.bool_())
    if field.dtype == "bfloat16":
        stored = column.to_numpy_ndarray() if field.shape else column.to_numpy()
        return dense_array(float32_of_bfloat16(stored))
    return column


def _field(field: Field, array: Any) -> Any:
    plain = pa.field(field.name, array.type)
    return plain.with_metadata({WIDTH: str(field.width)}) if field.kind == "sparse" else plain
