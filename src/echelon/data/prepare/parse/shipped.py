"""Records that are read as their file is cut: a block carries them as columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from echelon.data.prepare.blocks import Block


def ship(batch: Any) -> bytes:
    """A record batch as the bytes of a block."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def shipped(block: Block) -> Any:
    """The record batch that a block carries."""
    with pa.ipc.open_stream(pa.py_buffer(block.content())) as stream:
        return stream.read_next_batch()
