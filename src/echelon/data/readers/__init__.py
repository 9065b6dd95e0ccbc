"""Readers: one per format, all of them streams of Arrow record batches.

What is small is collected into a table and kept in memory; what is large goes batch by batch to
`write_shards`. Columns are numbers, fixed-shape tensors (images, vectors), lists or text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from echelon.core.errors import ConfigError, DataError, unknown
from echelon.data.readers.detect import detect

__all__ = ["FORMATS", "detect", "read"]

_READERS = {
    "csv": ("delimited", "read_csv"),
    "tsv": ("delimited", "read_tsv"),
    "jsonl": ("jsonl", "read_jsonl"),
    "parquet": ("parquet", "read_parquet"),
    "numpy": ("npy", "read_numpy"),
    "idx": ("idx", "read_idx"),
    "images": ("images", "read_images"),
    "text": ("documents", "read_text"),
    "libsvm": ("libsvm", "read_libsvm"),
    "shards": ("shards", "read_shards"),
    "criteo": ("criteo", "read_criteo"),
    "movielens": ("movielens", "read_movielens"),
}
FORMATS = tuple(_READERS)


def read(path: str | Path, format: str = "auto", **options: Any) -> Iterator[Any]:
    """The record batches of a file or a folder; `options` are those of the format's reader."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    name = detect(path) if format == "auto" else format
    if name not in _READERS:
        raise DataError(unknown("format", name, ("auto", *FORMATS)))
    module, function = _READERS[name]
    reader: Callable[..., Iterator[Any]] = getattr(
        import_module(f"echelon.data.readers.{module}"), function
    )
    _check_options(name, reader, options)
    return reader(path, **options)


def _check_options(name: str, reader: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse options that the reader does not have, and values that are not of its types."""
    known = [option for option in inspect.signature(reader).parameters if option != "path"]
    types = get_type_hints(reader.func if isinstance(reader, partial) else reader)
    for option, value in options.items():
        if option not in known:
            raise DataError(unknown(f"option of format {name}", option, known))
        try:
            TypeAdapter(types[option]).validate_python(value, strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            rule = "input should be a list" if fault["type"] == "sequence_str" else fault["msg"]
            # No fault of the file's: to read it with more care would not help.
            raise ConfigError(
                f"option {option} is {value!r}: {rule[0].lower()}{rule[1:]}"
            ) from None
