"""Where the memory of a record batch lies in an Arrow file, found without having that memory.

A shard is one record batch, which may be larger than what a worker should hold. So a batch of the
same lengths is made over memory that is never touched (the kernel gives it none), written to
nowhere, and what would have been written where is noted. Then the parts are filled in, in any
order, as they come.
"""

from __future__ import annotations

import io
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from echelon.data.shards.schema import Field, Schema, arrow_schema


class Lengths(NamedTuple):
    """Of a column: its rows, and the numbers or bytes in all of them, where they differ."""

    rows: int
    entries: int = 0


class Layout(NamedTuple):
    """A file but for its columns: what stands where, and where the parts of each column go."""

    frame: list[tuple[int, bytes]]
    parts: dict[str, list[int]]
    """Column → where its offsets (if it has any) and its numbers begin."""
    size: int


def layout(schema: Schema, lengths: dict[str, Lengths]) -> Layout:
    """The file that a shard of these columns will be."""
    memory = _Memory()
    try:
        arrays = [_phantom(memory, field, lengths[field.name]) for field in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema))
        noted = _Noted(memory)
        with pa.PythonFile(noted, mode="w") as sink, pa.ipc.new_file(sink, batch.schema) as stream:
            stream.write_batch(batch)
        parts = {name: [noted.found[at] for at in spans] for name, spans in memory.parts.items()}
        return Layout(noted.frame, parts, noted.at)
    finally:
        del arrays, batch
        memory.close()


class _Memory:
    """Spans of address space that nothing is behind."""

    def __init__(self) -> None:
        self._maps: list[Any] = []
        self.addresses: dict[int, int] = {}
        """Address → number of the span."""
        self.parts: dict[str, list[int]] = {}

    def span(self, name: str, count: int, dtype: Any) -> Any:
        size = max(1, count * np.dtype(dtype).itemsize)
        self._maps.append(mmap.mmap(-1, size))
        array = np.frombuffer(self._maps[-1], np.uint8)[: count * np.dtype(dtype).itemsize]
        number = len(self.addresses)
        self.addresses[array.__array_interface__["data"][0]] = number
        self.parts.setdefault(name, []).append(number)
        return array.view(dtype)

    def close(self) -> None:
        """Spans end with what refers to them."""
        self._maps = []


class _Noted(io.RawIOBase):
    """Takes in what is written: columns by their address, the rest as it is."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory
        self.at = 0
        self.frame: list[tuple[int, bytes]] = []
        self.found: dict[int, int] = dict.fromkeys(memory.addresses.values(), 0)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def write(self, data: Any) -> int:
        given = memoryview(data)
        address = np.frombuffer(given, np.uint8).__array_interface__["data"][0]
        number = self._memory.addresses.get(address)
        if number is None:
            self.frame.append((self.at, bytes(given)))
        else:
            self.found[number] = self.at
        self.at += given.nbytes
        return given.nbytes


def _phantom(memory: _Memory, field: Field, lengths: Lengths) -> Any:
    rows, entries = lengths
    if field.kind == "dense":
        count = int(np.prod(field.shape))
        flat = pa.array(memory.span(field.name, rows * count, field.storage))
        if not field.shape:
            return flat
        return pa.ExtensionArray.from_storage(
            field.arrow_type(), pa.FixedSizeListArray.from_arrays(flat, count)
        )
    offsets = memory.span(field.name, rows + 1, np.int64)
    offsets[-1] = entries  # how much of the numbers is written depends on it
    if field.kind == "string":
        text = pa.py_buffer(memory.span(field.name, entries, np.uint8))
        return pa.LargeStringArray.from_buffers(rows, pa.py_buffer(offsets), text)
    if field.kind == "sequence":
        values = pa.array(memory.span(field.name, entries, field.storage))
    else:
        indices = pa.array(memory.span(field.name, entries, field.index_storage))
        numbers = pa.array(memory.span(field.name, entries, field.storage))
        values = pa.StructArray.from_arrays([indices, numbers], ["index", "value"])
    return pa.LargeListArray.from_arrays(pa.array(offsets), values)


def begin(path: Path, plan: Layout) -> io.FileIO:
    """The file with everything but its columns, open for these."""
    file = io.FileIO(path, "w+")
    try:
        file.truncate(plan.size)
        for at, content in plan.frame:
            file.seek(at)
            file.write(content)
    except BaseException:
        file.close()
        raise
    return file
