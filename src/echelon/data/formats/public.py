"""Public data sets in the files they were published in: Criteo (click log) and MovieLens (ratings).

Both formats have only a strict reader, for jobs without a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.formats.delimited import read_csv, read_tsv
from echelon.data.formats.streams import open_stream, plain_name
from echelon.data.shards.encode import dense_array

# Criteo: a label, 13 whole numbers and 26 categories in hexadecimal, separated by tabs

NUMBERS = 13
CATEGORIES = 26
BUCKETS = 100_000


def read_criteo(path: Path, *, buckets: int = BUCKETS) -> Iterator[Any]:
    """Yield record batches with `dense` [13], `ids` [26] and, unless it is a test file, `y`.

    Numbers have long tails and become log(1 + n). Categories are hashed into `buckets` per field,
    so a file of any size is read in constant memory; bucket 0 is for missing ones.
    """
    if buckets < 2:
        raise DataError(f"option buckets is {buckets}: it must be at least 2")
    columns = _columns(path)
    numbers = [f"column{number}" for number in range(columns - CATEGORIES)]
    words = [f"column{number}" for number in range(columns - CATEGORIES, columns)]
    types = {**dict.fromkeys(numbers, "float64"), **dict.fromkeys(words, "string")}
    line = 1
    for batch in read_tsv(path, header=False, types=types):
        ids = [_hashed(path, line, batch.column(name), n, buckets) for n, name in enumerate(words)]
        found = {
            "dense": dense_array(_logarithms([batch.column(n) for n in numbers[-NUMBERS:]])),
            "ids": dense_array(np.stack(ids, 1)),
        }
        if len(numbers) > NUMBERS:
            found["y"] = batch.column("column0").cast(pa.float32())
        line += batch.num_rows
        yield pa.record_batch(found)


def is_criteo(path: Path) -> bool:
    """Return whether the first line of a file looks like a record of Criteo's log."""
    with open_stream(path) as stream:
        cells = stream.readline(1 << 16).decode("utf-8", "replace").rstrip("\r\n").split("\t")
    if len(cells) not in (NUMBERS + CATEGORIES, NUMBERS + CATEGORIES + 1):
        return False
    return all(_CATEGORY.fullmatch(cell) for cell in cells[-CATEGORIES:])


_CATEGORY = re.compile(r"[0-9a-f]{8}|")


def _columns(path: Path) -> int:
    with open_stream(path) as stream:
        columns = stream.readline().count(b"\t") + 1
    if columns not in (NUMBERS + CATEGORIES, NUMBERS + CATEGORIES + 1):
        raise DataError(
            f"{path}:1: {columns} fields: a record of Criteo's log has "
            f"{NUMBERS + CATEGORIES + 1}, or {NUMBERS + CATEGORIES} without its label"
        )
    return columns


def _logarithms(columns: list[Any]) -> np.ndarray[Any, Any]:
    values = np.stack([column.to_numpy(zero_copy_only=False) for column in columns], 1)
    return np.asarray(np.log1p(np.maximum(values, 0)), np.float32)


def _hashed(path: Path, line: int, column: Any, field: int, buckets: int) -> np.ndarray[Any, Any]:
    """Return the bucket numbers of one field; each field hashes the same word differently."""
    lengths = np.asarray(pa.compute.binary_length(column))
    text = np.frombuffer("".join(column.to_pylist()).encode(), np.uint8)
    wrong = (lengths != 0) & (lengths != 8)
    if not wrong.any():
        digits = _DIGITS[text].reshape(-1, 8)
        present = np.flatnonzero(lengths)
        wrong[present[(digits > 15).any(1)]] = True
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"{path}:{line + row}: category {field} is {column[row].as_py()!r}: not 8 digits of "
            f"a hexadecimal number"
        )
    out = np.zeros(len(column), np.int64)
    mixed = (digits @ _PLACES) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(field * 0xC2B2AE35)
    mixed ^= mixed >> np.uint64(29)
    out[present] = 1 + (mixed % np.uint64(buckets - 1)).astype(np.int64)
    return out


# The value of a hexadecimal digit by its character code; 16 marks any other character.
_DIGITS = np.full(256, 16, np.uint64)
_DIGITS[[ord(digit) for digit in "0123456789abcdef"]] = np.arange(16)
_PLACES = np.uint64(16) ** np.arange(7, -1, -1, dtype=np.uint64)


# MovieLens, in each of the forms it was published in:
#
# ratings.dat   user::movie::rating::time
# u.data        user<TAB>movie<TAB>rating<TAB>time
# ratings.csv   userId,movieId,rating,timestamp, with a header

LIKED = 4.0


def read_movielens(path: Path, *, liked: float = LIKED) -> Iterator[Any]:
    """Yield record batches with the categories `user` and `movie`, the `time`, and `label`.

    The label is 1 if the rating is at least `liked`.
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


_NAMES = ("user", "movie", "rating", "time")
_CSV_NAMES = ("userId", "movieId", "rating", "timestamp")


def _double_colons(path: Path) -> Iterator[Any]:
    """Yield the ratings of a `.dat` file; Arrow supports only separators of one character."""
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


_LINES = 1 << 24
"""Bytes of lines parsed at a time."""
