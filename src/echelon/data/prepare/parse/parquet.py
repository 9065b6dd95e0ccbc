"""Parquet: blocks are row groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.data.prepare import remote
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.parse.fit import conform, texts_are_text
from echelon.data.prepare.parse.parsed import Bad, Parsed, empty, lacking, one_batch, whole_block

_BROKEN = (pa.ArrowException, OSError)


def cut(source: Source, size: int) -> Iterator[Block]:
    try:
        with _opened(source.file) as file:
            about = file.metadata
            names = tuple(file.schema_arrow.names)
            groups = [about.row_group(number) for number in range(about.num_row_groups)]
            heights = [(group.num_rows, group.total_byte_size) for group in groups]
    except _BROKEN as error:
        yield Block(0, source.file, 0, 0, 1, source, fault=_told(error))
        return
    if not sum(rows for rows, _ in heights):
        yield Block(0, source.file, 0, 0, 1, source, fault="empty: it has no records")
        return
    record = 1
    for start, stop in _grouped([volume for _, volume in heights], size):
        yield Block(0, source.file, start, stop - start, record, source, names=names)
        record += sum(rows for rows, _ in heights[start:stop])


def count(block: Block) -> int:
    with _opened(block.file) as file:
        return sum(file.metadata.row_group(group).num_rows for group in _groups(block))


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    try:
        with _opened(block.file) as file:
            schema = file.schema_arrow
    except _BROKEN:
        return None
    chosen = block.source.options.columns or schema.names
    for name in chosen:
        if name not in schema.names:
            raise DataError(f"{block.file}: {unknown('column', name, schema.names)}")
    return pa.schema([schema.field(name).remove_metadata() for name in chosen])


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    if reason := lacking(wanted, block.names or ()):
        return whole_block(block, wanted, reason, count(block), line=1)
    parts = list(_parts(block, wanted))
    return Parsed(
        pa.concat_batches([part.batch for part in parts]),
        np.concatenate([part.lines for part in parts]),
        [bad for part in parts for bad in part.bad],
    )


def _parts(block: Block, wanted: pa.Schema) -> Iterator[Parsed]:
    """Row group by row group: one that is damaged does not take the others with it."""
    record = block.record
    with _opened(block.file) as file:
        for group in _groups(block):
            rows = file.metadata.row_group(group).num_rows
            lines = record + np.arange(rows)
            try:
                batch = one_batch(file.read_row_group(group, wanted.names, use_threads=False))
            except _BROKEN as error:
                reason = f"row group {group}: {_told(error)}"
                bad = [Bad(block.file, record, reason, records=rows)]
                yield Parsed(empty(wanted), lines[:0], bad)
            else:
                columns = {name: batch.column(name) for name in wanted.names}
                columns, lines, bad = texts_are_text(block, columns, lines)
                yield conform(block, columns, lines, wanted, bad)
            record += rows


def _groups(block: Block) -> range:
    return range(block.start, block.start + block.size)


def _grouped(volumes: list[int], size: int) -> Iterator[tuple[int, int]]:
    """Row groups one after the other, as many as make up a block."""
    start, volume = 0, 0
    for number, one in enumerate(volumes):
        if volume and volume + one > size:
            yield start, number
            start, volume = number, 0
        volume += one
    yield start, len(volumes)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    # Imported on use: nobody else needs it, and it is the larger half of pyarrow.
    from pyarrow.parquet import ParquetFile

    with remote.open_binary(path) as stream, ParquetFile(stream) as file:
        yield file


def _told(error: Exception) -> str:
    return f"not a whole Parquet file: {str(error).splitlines()[0]}"
