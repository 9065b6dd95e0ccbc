"""Parquet.

The block parser (`cut`, `count`, `infer`, `parse`) serves recipes: a block is one or several row
groups, or a piece of a large one. A damaged row group costs only its own records. The strict reader
`read_parquet` serves jobs without a recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.data.formats import remote
from echelon.data.formats.records import (
    Bad,
    Block,
    Parsed,
    Source,
    conform,
    empty,
    lacking,
    one_batch,
    ship,
    shipped,
    texts_are_text,
    whole_block,
)

_BROKEN = (pa.ArrowException, OSError)


# Block parser


def cut(source: Source, size: int) -> Iterator[Block]:
    try:
        with _opened(source.file) as file:
            names = tuple(file.schema_arrow.names)
            groups = _groups_of(file.metadata)
    except _BROKEN as error:
        yield Block(0, source.file, 0, 0, 1, source, fault=_damage(error))
        return
    total = sum(group.rows for group in groups)
    if fault := _fault(names, total):
        yield Block(0, source.file, 0, 0, 1, source, fault=fault, broken=total)
        return
    record = 1
    for start, stop in _grouped([group.volume for group in groups], size):
        some = groups[start:stop]
        if any(group.volume > size for group in some):
            for number, group in enumerate(some, start):
                yield from _pieces(source, number, group, size, record)
                record += group.rows
            continue
        yield Block(0, source.file, start, stop - start, record, source, names=names)
        record += sum(group.rows for group in some)


class _Group(NamedTuple):
    rows: int
    volume: int


def _groups_of(about: Any) -> list[_Group]:
    found = [about.row_group(number) for number in range(about.num_row_groups)]
    return [_Group(group.num_rows, group.total_byte_size) for group in found]


def _fault(names: tuple[str, ...], rows: int) -> str | None:
    """Return the reason why no record of a file can be read, or None."""
    if twice := _named_twice(names):
        return f"two columns are called {twice!r}"
    return None if rows else "empty: it has no records"


def _grouped(volumes: list[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive row groups, each of about `size` bytes."""
    start, volume = 0, 0
    for number, one in enumerate(volumes):
        if volume and volume + one > size:
            yield start, number
            start, volume = number, 0
        volume += one
    yield start, len(volumes)


def _pieces(source: Source, number: int, group: _Group, size: int, record: int) -> Iterator[Block]:
    """Read a row group that is too large for one block, and yield blocks that carry its rows.

    A page of a row group is found only by reading the pages before it. So the group is read once,
    here, and not by every worker up to its own piece.
    """
    step = max(1, group.rows * size // group.volume)
    done = 0
    try:
        with _opened(source.file, _BUFFER) as file:
            names = tuple(file.schema_arrow.names)
            for batch in file.iter_batches(step, row_groups=[number], use_threads=False):
                rows, first = batch.num_rows, record + done
                yield Block(
                    0, source.file, done, rows, first, source, names=names, data=ship(batch)
                )
                done += rows
    except _BROKEN as error:
        fault, rest = f"row group {number}: {_damage(error)}", group.rows - done
        yield Block(0, source.file, 0, 0, record + done, source, fault=fault, broken=rest)


_BUFFER = 1 << 20
"""Bytes of a column held at a time while a large row group is read in pieces."""


def count(block: Block) -> int:
    if block.data is not None:
        return block.size
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
    if block.data is not None:
        return _conformed(block, shipped(block), block.record, wanted)
    parts = list(_parts(block, wanted))
    return Parsed(
        pa.concat_batches([part.batch for part in parts]),
        np.concatenate([part.lines for part in parts]),
        [bad for part in parts for bad in part.bad],
    )


def _parts(block: Block, wanted: pa.Schema) -> Iterator[Parsed]:
    """Parse each row group alone, so that a damaged one costs only its own records."""
    record = block.record
    with _opened(block.file) as file:
        for group in _groups(block):
            rows = file.metadata.row_group(group).num_rows
            try:
                batch = one_batch(file.read_row_group(group, wanted.names, use_threads=False))
            except _BROKEN as error:
                reason = f"row group {group}: {_damage(error)}"
                bad = [Bad(block.file, record, reason, records=rows)]
                yield Parsed(empty(wanted), np.zeros(0, np.int64), bad)
            else:
                yield _conformed(block, batch, record, wanted)
            record += rows


def _conformed(block: Block, batch: Any, record: int, wanted: pa.Schema) -> Parsed:
    """Return the wanted columns of a batch; `record` is the number of its first record."""
    columns = {name: batch.column(name) for name in wanted.names}
    columns, lines, bad = texts_are_text(block, columns, record + np.arange(batch.num_rows))
    return conform(block, columns, lines, wanted, bad)


def _groups(block: Block) -> range:
    return range(block.start, block.start + block.size)


@contextmanager
def _opened(path: str, buffer: int = 0) -> Iterator[Any]:
    """Open a Parquet file; `buffer` limits the bytes held of a column (0: a whole row group)."""
    # Imported on use: only Parquet needs it, and it is the larger half of pyarrow.
    from pyarrow.parquet import ParquetFile

    with remote.open_binary(path) as stream, ParquetFile(stream, buffer_size=buffer) as file:
        yield file


def _damage(error: Exception) -> str:
    return f"not a whole Parquet file: {str(error).splitlines()[0]}"


# Strict reader

ROWS = 65_536


def read_parquet(
    path: Path, *, columns: Sequence[str] | None = None, rows: int = ROWS
) -> Iterator[Any]:
    """Yield the record batches of a file, `rows` records each."""
    # Imported on use: only Parquet needs it, and it is the larger half of pyarrow.
    from pyarrow.parquet import ParquetFile

    done = 0
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := _named_twice(names):
                raise DataError(f"{path}: two columns are called {twice!r}")
            for name in columns or ():
                if name not in names:
                    raise DataError(f"{path}: {unknown('column', name, names)}")
            for batch in file.iter_batches(rows, columns=list(columns) if columns else None):
                done += batch.num_rows
                yield batch
    except (pa.ArrowException, OSError) as error:
        line = str(error).splitlines()[0]
        raise DataError(f"{path}: not a whole Parquet file, after record {done}: {line}") from None


def _named_twice(names: Sequence[str]) -> str | None:
    """Return the first name that two columns share, or None."""
    return next((name for at, name in enumerate(names) if name in names[:at]), None)
