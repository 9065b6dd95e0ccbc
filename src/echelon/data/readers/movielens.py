"""The ratings of MovieLens, in each of the forms they were published in.

ratings.dat   user::movie::rating::time
u.data        user<TAB>movie<TAB>rating<TAB>time
ratings.csv   userId,movieId,rating,timestamp, with a header
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.readers.delimited import read_csv, read_tsv
from echelon.data.readers.stream import open_stream, plain_name

LIKED = 4.0
_NAMES = ("user", "movie", "rating", "time")
_CSV_NAMES = ("userId", "movieId", "rating", "timestamp")
_LINES = 1 << 24


def read_movielens(path: Path, *, liked: float = LIKED) -> Iterator[Any]:
    """Record batches with the categories `user` and `movie`, the `time`, and `label`.

    The label is 1 where the rating is at least `liked`.
    """
    for batch in _ratings(path):
        user, movie, rating, time = (batch.column(name) for name in _NAMES)
        label = pa.compute.greater_equal(rating, liked).cast(pa.int64())
        yield pa.record_batch(
            {
                "user": user.cast(pa.int64()).dictionary_encode(),
                "movie": movie.cast(pa.int64()).dictionary_encode(),
                "time": time.cast(pa.float64()),
                "label": label,
            }
        )


def is_movielens(path: Path) -> bool:
    return plain_name(path) in ("ratings.dat", "u.data", "ratings.csv")


def _ratings(path: Path) -> Iterator[Any]:
    name = plain_name(path)
    if name.endswith(".dat"):
        yield from _double_colons(path)
    elif name.endswith(".csv"):
        for batch in read_csv(path):
            if tuple(batch.schema.names) != _CSV_NAMES:
                raise DataError(
                    f"{path}:1: columns {', '.join(batch.schema.names)}: ratings of MovieLens "
                    f"have {', '.join(_CSV_NAMES)}"
                )
            yield pa.RecordBatch.from_arrays(batch.columns, _NAMES)
    else:
        for batch in read_tsv(path, header=False):
            if batch.num_columns != len(_NAMES):
                raise DataError(f"{path}:1: {batch.num_columns} fields: a rating has 4")
            yield pa.RecordBatch.from_arrays(batch.columns, _NAMES)


def _double_colons(path: Path) -> Iterator[Any]:
    """Arrow knows no separators of two characters."""
    done = 0
    with open_stream(path) as stream:
        while lines := stream.readlines(_LINES):
            cells = b"".join(lines).replace(b"::", b"\n").split()
            wrong = next((n for n, line in enumerate(lines) if line.count(b"::") != 3), None)
            if wrong is not None:
                raise DataError(
                    f"{path}:{done + wrong + 1}: {lines[wrong].count(b'::') + 1} fields: "
                    f"a rating has 4"
                )
            try:
                values = np.array(cells, "S").astype(np.float64).reshape(-1, 4)
            except ValueError as error:
                raise DataError(f"{path}: after line {done}: {error}") from None
            done += len(lines)
            yield pa.RecordBatch.from_arrays([pa.array(c) for c in values.T], _NAMES)
