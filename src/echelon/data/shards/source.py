"""A folder of shards as a source of batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from echelon.core.errors import DataError, unknown
from echelon.core.types import Batch
from echelon.data.shards.file import open_shards, verify_shard
from echelon.data.shards.gather import Piece, gather_dense, gather_sequence, gather_sparse, plan
from echelon.data.shards.manifest import Manifest, read_manifest
from echelon.data.shards.schema import Field, Schema, length_name


class ShardSource:
    """Samples of a folder of shards, gathered straight from the memory map.

    Sequences are padded with 0 to the longest of the batch, and `<name>_length` says how long
    each one is. Text columns are left out: tensors hold no strings.

    Sizes, Arrow footers and counts are checked here. `verify` compares each shard with its
    checksums when it is first touched; `verify_shards` does so for the whole set at once.
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
        # Padding depends on who else is in the batch, so such batches cannot be made together.
        self.chunkable = all(field.kind != "sequence" for field in self.schema)

    def __len__(self) -> int:
        return self.manifest.rows

    def gather(self, rows: Tensor) -> Batch:
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


def verify_shards(folder: str | Path) -> Manifest:
    """Check every byte of a set against its checksums; the first damage is named."""
    manifest = read_manifest(folder)
    for shard in open_shards(Path(folder), manifest):
        verify_shard(shard, manifest.block)
    return manifest


def _gather_into(batch: Batch, field: Field, pieces: Sequence[Piece], count: int) -> None:
    if field.kind == "dense":
        batch[field.name] = gather_dense(field, pieces, count)
    elif field.kind == "sparse":
        batch[field.name] = gather_sparse(field, pieces, count)
    else:
        values, lengths = gather_sequence(field, pieces, count)
        batch[field.name] = values
        batch[length_name(field.name)] = lengths


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
