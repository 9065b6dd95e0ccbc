"""What a plan has to know of each record: a few bytes for its class, group, time and length."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import DataError
from echelon.data.prepare.clean.missing import gaps
from echelon.data.prepare.feature import Feature
from echelon.data.prepare.recipe import Recipe

SPLIT, CLASS, LENGTH = "split", "class", "length"


def key_columns(recipe: Recipe, features: Sequence[Feature]) -> dict[str, str]:
    """Which column says the key that records are split by, and which one their class."""
    found: dict[str, str] = {}
    split, balance = recipe.split, recipe.balance
    if split is not None and split.column is not None:
        found[SPLIT] = split.column
    stratified = split.column if split is not None and split.by == "stratified" else None
    classes = [one.sources[0] for one in features if one.kind == "classes"]
    of_class = balance.column if balance is not None else stratified
    if of_class is None and classes:
        of_class = classes[0]
    if of_class is not None:
        found[CLASS] = of_class
    return found


def required(recipe: Recipe) -> list[str]:
    """Columns without which a record has no place."""
    split, balance = recipe.split, recipe.balance
    found = [split.column] if split is not None and split.column is not None else []
    return found + ([balance.column] if balance is not None else [])


def without_key(block: pa.RecordBatch, names: Sequence[str]) -> list[tuple[int, str]]:
    """Rows that have no value in a column that records are split or balanced by."""
    found: dict[int, str] = {}
    for name in names:
        for row in np.flatnonzero(gaps(block.column(name))).tolist():
            found.setdefault(row, f"column {name!r} has no value: records are divided by it")
    return sorted(found.items())


def keys(
    block: pa.RecordBatch, columns: dict[str, str], by: str | None, texts: Collection[str]
) -> dict[str, Any]:
    """A number per row for each key; `by` is how records are split, `texts` have a length."""
    found: dict[str, Any] = {}
    for key, name in columns.items():
        timed = key == SPLIT and by == "time"
        found[key] = _times(name, block.column(name)) if timed else _words(block.column(name))
    lengths = _lengths(block, texts)
    if lengths is not None:
        found[LENGTH] = lengths
    return found


def _words(column: Any) -> NDArray[np.uint64]:
    """A 64-bit word per value: equal ones for equal values, whatever their block."""
    coded = column.dictionary_encode()
    kinds = _bytes(coded.dictionary).to_pylist()
    table = np.zeros(len(kinds) + 1, np.uint64)
    for at, kind in enumerate(kinds):
        digest = hashlib.blake2b(kind, digest_size=8).digest()
        table[at] = int.from_bytes(digest, "little")
    at = coded.indices.fill_null(len(kinds)).to_numpy(zero_copy_only=False)
    return np.asarray(table[at])


def _bytes(values: Any) -> Any:
    raw = pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)
    return (values if raw else values.cast(pa.large_utf8())).cast(pa.large_binary())


def is_key(kind: pa.DataType) -> bool:
    """Whether values of this type have a word: those of lists and structs have none."""
    try:
        _words(pa.array([], kind))
    except pa.ArrowNotImplementedError:
        return False
    return True


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _times(name: str, column: Any) -> NDArray[Any]:
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    try:
        stamps = column.cast(pa.timestamp("us")) if not pa.types.is_timestamp(kind) else column
        return np.asarray(stamps.cast(pa.int64()).to_numpy(zero_copy_only=False))
    except pa.ArrowException as error:
        line = str(error).splitlines()[0]
        raise DataError(f"split by time: column {name!r} holds no times: {line}") from None


def _lengths(block: pa.RecordBatch, texts: Collection[str]) -> NDArray[np.int32] | None:
    """How long the texts of a row are in all: shards are to get as much work each."""
    columns = [
        block.column(field.name)
        for field in block.schema
        if field.name in texts and is_text(field.type)
    ]
    if not columns:
        return None
    total = np.zeros(block.num_rows, np.int64)
    for text in columns:
        total += pc.binary_length(text).fill_null(0).to_numpy(zero_copy_only=False)
    return np.minimum(total, np.iinfo(np.int32).max).astype(np.int32)
