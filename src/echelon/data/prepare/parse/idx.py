"""The idx format of MNIST: images, and the labels that lie beside them.

It is read as it is cut: a block holds its records already as columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.data.prepare.blocks import Block
from echelon.data.prepare.cutting import Content
from echelon.data.prepare.inputs import Source, labels_of
from echelon.data.prepare.parse.fit import conform
from echelon.data.prepare.parse.parsed import Parsed, lacking, whole_block
from echelon.data.prepare.parse.shipped import ship, shipped
from echelon.data.readers.idx import TYPES
from echelon.data.shards.encode import dense_array


def cut(source: Source, size: int) -> Iterator[Block]:
    with ExitStack() as stack:
        x = _Values(stack.enter_context(closing(Content(source.file))))
        values = {"x": x}
        labels = labels_of(source.file)
        if labels is not None and x.fault is None:
            values["y"] = _Values(stack.enter_context(closing(Content(labels[0]))))
        fault = next((one.fault for one in values.values() if one.fault), None)
        if fault is not None:
            where = source.file if x.fault or labels is None else labels[0]
            yield Block(0, where, 0, 0, 1, source, fault=fault, broken=x.count)
            return
        yield from _blocks(source, values, size)


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


class _Values:
    """The numbers of one file, some records at a time."""

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
        """As many records as there are left, at most `rows`."""
        data = self._content.exactly(rows * self.item)
        whole = len(data) // self.item
        values = np.frombuffer(data[: whole * self.item], self._dtype).reshape(whole, *self._form)
        return values.astype(self._dtype.newbyteorder("="), copy=False)

    @property
    def damage(self) -> str:
        return self._content.damage or "truncated"


def _blocks(source: Source, values: Mapping[str, _Values], size: int) -> Iterator[Block]:
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
