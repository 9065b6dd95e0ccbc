"""Record batches made one, in flat memory: what is large is put together in files.

A shard is one record batch, whose columns each lie in one piece. A few megabytes are joined in
memory. Of more, the numbers of every column are written one after the other to a file aside, and
that file is mapped: the system may drop its pages whenever it wants them for something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.data.shards.file import map_file
from echelon.data.shards.schema import Field, Schema, arrow_schema

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
