"""The idx format of MNIST: a magic number, big-endian sizes, then the numbers.

0 0 TYPE DIMENSIONS | size × DIMENSIONS (uint32) | numbers
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.readers.stream import CHUNK, COMPRESSED, Stream, open_stream
from echelon.data.shards.encode import dense_array

TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_BATCH = 64 << 20


def read_idx(path: Path) -> Iterator[Any]:
    """Record batches with `x` and, where the labels lie beside the images, `y`.

    Images get a channel: [N, H, W] is read as [N, 1, H, W].
    """
    labels = labels_beside(path)
    with ExitStack() as stack:
        x = _Values(path, stack.enter_context(open_stream(path)))
        columns = {"x": x}
        if labels is not None:
            columns["y"] = _Values(labels, stack.enter_context(open_stream(labels)))
            _same_count(x, columns["y"])
        step = max(1, _BATCH // max(1, x.item_bytes))
        for start in range(0, x.count, step):
            rows = min(step, x.count - start)
            yield pa.record_batch(
                {name: dense_array(values.read(rows)) for name, values in columns.items()}
            )
        for values in columns.values():
            values.finish()


def labels_beside(path: Path) -> Path | None:
    """`train-labels-idx1-ubyte.gz` beside `train-images-idx3-ubyte.gz`."""
    choices = [path.with_name(name) for name in label_names(path.name)]
    return next((choice for choice in choices if choice.exists()), None)


def label_names(images: str) -> list[str]:
    """What the labels of a file of images may be called; nothing, if it holds no images."""
    if "images" not in images:
        return []
    name = images.replace("images", "labels").replace("idx3", "idx1")
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return [name + suffix for suffix in ("", *COMPRESSED)]


class _Values:
    """The numbers of one file, some rows at a time."""

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


def _same_count(x: _Values, y: _Values) -> None:
    if x.count != y.count:
        raise DataError(f"{y._path}: {y.count} labels for {x.count} images of {x._path.name}")
