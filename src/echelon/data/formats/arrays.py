"""Arrays of numbers: idx (the format of MNIST) and numpy's .npy and .npz.

An idx file is a magic number, big-endian sizes, then the numbers:

    0 0 TYPE DIMENSIONS | size × DIMENSIONS (uint32) | numbers

Labels in a file beside the images are read along. idx has two readers, which share the table of
types: the block parser (`cut`, `count`, `infer`, `parse`) for recipes, and the
strict reader `read_idx` for jobs without a recipe. numpy files have only a strict reader,
`read_numpy`.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.formats.cutting import Content
from echelon.data.formats.files import labels_beside, labels_of
from echelon.data.formats.records import (
    Block,
    Parsed,
    Source,
    conform,
    lacking,
    ship,
    shipped,
    whole_block,
)
from echelon.data.formats.streams import CHUNK, Stream, open_stream
from echelon.data.shards.encode import dense_array

# Numpy types by the TYPE byte of an idx file.
TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


# Block parser of idx


def cut(source: Source, size: int) -> Iterator[Block]:
    with ExitStack() as stack:
        x = _IdxContent(stack.enter_context(closing(Content(source.file))))
        values = {"x": x}
        labels = labels_of(source.file)
        if labels is not None and x.fault is None:
            values["y"] = _IdxContent(stack.enter_context(closing(Content(labels[0]))))
        fault = next((one.fault for one in values.values() if one.fault), None)
        if fault is not None:
            where = source.file if x.fault or labels is None else labels[0]
            yield Block(0, where, 0, 0, 1, source, fault=fault, broken=x.count)
            return
        yield from _blocks(source, values, size)


def _blocks(source: Source, values: Mapping[str, _IdxContent], size: int) -> Iterator[Block]:
    total = values["x"].count
    step = max(1, size // sum(one.item for one in values.values()))
    done = 0
    while done < total:
        rows = min(step, total - done)
        arrays = {name: one.read(rows) for name, one in values.items()}
        whole = min(len(array) for array in arrays.values())
        if whole:
            columns = {name: dense_array(array[:whole]) for name, array in arrays.items()}
            data = ship(pa.record_batch(columns))
            yield Block(0, source.file, done, whole, done + 1, source, data=data)
        done += whole
        if whole < rows:
            short = min(arrays, key=lambda name: len(arrays[name]))
            what = "labels end" if short == "y" else "file ends"
            fault = f"the {what} before record {done + 1} of {total}: {values[short].damage}"
            yield Block(0, source.file, done, 0, done + 1, source, fault=fault, broken=total - done)
            return


def count(block: Block) -> int:
    return block.size


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    return shipped(block).schema


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    batch = shipped(block)
    if reason := lacking(wanted, batch.schema.names):
        return whole_block(block, wanted, reason, batch.num_rows)
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    return conform(block, columns, block.record + np.arange(batch.num_rows), wanted, [])


class _IdxContent:
    """One idx file for the block parser: notes an error as its `fault` instead of raising it."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self.count, self.fault = 0, None
        magic = content.exactly(4)
        if not magic:
            self.fault = content.damage or "empty"
        elif len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not magic[3]:
            self.fault = f"not an idx file: its magic number is {magic.hex(' ')}"
        else:
            self._shape(np.dtype(TYPES[magic[2]]), content.exactly(4 * magic[3]), magic[3])

    def _shape(self, dtype: np.dtype[Any], sizes: bytes, dimensions: int) -> None:
        if len(sizes) < 4 * dimensions:
            self.fault = "truncated within its header"
            return
        self.count, *shape = np.frombuffer(sizes, ">u4").tolist()
        self._dtype, self._form = dtype, (1, *shape) if len(shape) == 2 else tuple(shape)
        self.item = dtype.itemsize * math.prod(shape)
        if not self.count or not self.item:
            self.fault = f"empty: its sizes are {[self.count, *shape]}"

    def read(self, rows: int) -> np.ndarray[Any, Any]:
        """Read up to `rows` records; fewer only where the file ends."""
        data = self._content.exactly(rows * self.item)
        whole = len(data) // self.item
        values = np.frombuffer(data[: whole * self.item], self._dtype).reshape(whole, *self._form)
        return values.astype(self._dtype.newbyteorder("="), copy=False)

    @property
    def damage(self) -> str:
        return self._content.damage or "truncated"


# Strict readers

_BATCH = 64 << 20
"""Bytes of a record batch of the strict readers, about."""


def read_idx(path: Path) -> Iterator[Any]:
    """Yield record batches with `x` and, if a file of labels is beside the images, `y`.

    Images get a channel: [N, H, W] becomes [N, 1, H, W].
    """
    labels = labels_beside(path)
    with ExitStack() as stack:
        x = _IdxFile(path, stack.enter_context(open_stream(path)))
        columns = {"x": x}
        if labels is not None:
            columns["y"] = _IdxFile(labels, stack.enter_context(open_stream(labels)))
            _same_count(x, columns["y"])
        step = max(1, _BATCH // max(1, x.item_bytes))
        for start in range(0, x.count, step):
            rows = min(step, x.count - start)
            yield pa.record_batch(
                {name: dense_array(values.read(rows)) for name, values in columns.items()}
            )
        for values in columns.values():
            values.finish()


class _IdxFile:
    """One idx file for the strict reader: it raises `DataError` for what is wrong."""

    def __init__(self, path: Path, stream: io.BufferedReader[Stream]) -> None:
        self._path = path
        self._stream = stream
        self._done = 0
        magic = stream.read(4)
        if not magic:
            raise DataError(f"{path}: empty")
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in TYPES or not magic[3]:
            raise DataError(f"{path}: not an idx file: its magic number is {magic.hex(' ')}")
        self._dtype = np.dtype(TYPES[magic[2]])
        sizes = stream.read(4 * magic[3])
        if len(sizes) < 4 * magic[3]:
            raise DataError(f"{path}: truncated within its header")
        self.count, *shape = np.frombuffer(sizes, ">u4").tolist()
        self.shape = tuple(shape) if len(shape) != 2 else (1, *shape)
        self.item_bytes = self._dtype.itemsize * math.prod(shape)
        if not self.count or not self.item_bytes:
            raise DataError(f"{path}: empty: its sizes are {[self.count, *shape]}")

    def read(self, rows: int) -> np.ndarray[Any, Any]:
        memory = bytearray(rows * self.item_bytes)
        done, view = 0, memoryview(memory)
        while done < len(memory):
            got = self._stream.readinto(view[done : done + CHUNK])
            if not got:
                record = self._done + done // self.item_bytes
                raise DataError(f"{self._path}: truncated in record {record} of {self.count}")
            done += got
        self._done += rows
        values = np.frombuffer(memory, self._dtype).reshape(rows, *self.shape)
        return values.astype(self._dtype.newbyteorder("="), copy=False)

    def finish(self) -> None:
        if self._stream.read(1):
            raise DataError(f"{self._path}: goes on after its last record ({self.count})")


def _same_count(x: _IdxFile, y: _IdxFile) -> None:
    if x.count != y.count:
        raise DataError(f"{y._path}: {y.count} labels for {x.count} images of {x._path.name}")


def read_numpy(path: Path, *, part: str | None = None) -> Iterator[Any]:
    """Yield record batches of arrays of equal length: `x` of a .npy, or those named in a .npz.

    `part` selects the arrays of a .npz whose names end in it and drops that ending: `train` selects
    `x_train` and `y_train`.
    """
    arrays = load_arrays(path)
    if part is not None:
        arrays = {
            name.removesuffix(f"_{part}"): array
            for name, array in arrays.items()
            if name.endswith(f"_{part}")
        }
    _check_lengths(path, arrays)
    rows = len(next(iter(arrays.values())))
    step = max(1, _BATCH * rows // max(1, sum(array.nbytes for array in arrays.values())))
    for start in range(0, rows, step):
        yield pa.record_batch(
            {name: _arrow_array(array[start : start + step]) for name, array in arrays.items()}
        )


def _check_lengths(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    if not arrays or not all(array.ndim and len(array) for array in arrays.values()):
        raise DataError(f"{path}: empty: every array must have at least one row")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise DataError(f"{path}: its arrays differ in length: {listed}")


def _arrow_array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind in "US":
        return pa.array(array.astype(str).tolist())
    return dense_array(array.astype(array.dtype.newbyteorder("="), copy=False))


def load_arrays(path: Path, names: Sequence[str] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a numpy file, or only those in `names`."""
    current = ""
    try:
        if path.suffix == ".npy":
            return {"x": np.load(path, mmap_mode="r", allow_pickle=False)}
        arrays = {}
        with np.load(path, allow_pickle=False) as file:
            for name in names or file.files:
                current = f", array {name!r}"
                arrays[name] = file[name]
        return arrays
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise DataError(f"{path}: not a whole numpy file{current}: {error}") from None


def names_in(path: Path) -> list[str]:
    """Return the names of the arrays in a .npz."""
    try:
        with zipfile.ZipFile(path) as file:
            return [name.removesuffix(".npy") for name in file.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not a whole .npz file: {error}") from None
