"""Folders of shards, read again as record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.data.shards.encode import dense_array
from echelon.data.shards.encode_arrow import WIDTH
from echelon.data.shards.file import open_shards, record_batch
from echelon.data.shards.manifest import read_manifest
from echelon.data.shards.schema import Field


def read_shards(path: Path, *, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """One record batch per shard; its columns lie in the memory map."""
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
    """Booleans as booleans again, and bfloat16 as the float32 of the same value."""
    if field.dtype == "bool" and not field.shape and field.kind == "dense":
        return column.cast(pa.bool_())
    if field.dtype == "bfloat16":
        bits = column.to_numpy_ndarray() if field.shape else column.to_numpy()
        return dense_array((bits.astype(np.uint32) << 16).view(np.float32))
    return column


def _field(field: Field, array: Any) -> Any:
    plain = pa.field(field.name, array.type)
    return plain.with_metadata({WIDTH: str(field.width)}) if field.kind == "sparse" else plain
