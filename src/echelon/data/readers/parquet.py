"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from echelon.core.errors import DataError, unknown

ROWS = 65_536


def named_twice(names: Sequence[str]) -> str | None:
    """The first name that two columns have."""
    return next((name for at, name in enumerate(names) if name in names[:at]), None)


def read_parquet(
    path: Path, *, columns: Sequence[str] | None = None, rows: int = ROWS
) -> Iterator[Any]:
    """Record batches of a file, `rows` at a time."""
    # Imported on use: nobody else needs it, and it is the larger half of pyarrow.
    from pyarrow.parquet import ParquetFile

    done = 0
    try:
        with ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := named_twice(names):
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
