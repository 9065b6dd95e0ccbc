"""`read()` (strict), `blocks()`, `parse()`, registry of Format.

Readers: one per format, all of them streams of Arrow record batches.

What is small is collected into a table and kept in memory; what is large goes batch by batch to
`write_shards`. Columns are numbers, fixed-shape tensors (images, vectors), lists or text.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from echelon.core.errors import ConfigError, DataError, unknown
from echelon.data.formats.files import detect, sources
from echelon.data.formats.records import (
    SIZE,
    Bad,
    Block,
    Input,
    Parsed,
    Source,
    arrow_type,
    wanted_schema,
    whole_block,
)

__all__ = [
    "FORMATS",
    "Bad",
    "Parsed",
    "arrow_type",
    "detect",
    "format_of",
    "infer",
    "parse",
    "read",
    "refuse_others",
]


# --- readers ---

_READERS = {
    "csv": ("formats.delimited", "read_csv"),
    "tsv": ("formats.delimited", "read_tsv"),
    "jsonl": ("formats.jsonl", "read_jsonl"),
    "parquet": ("formats.parquet", "read_parquet"),
    "numpy": ("formats.arrays", "read_numpy"),
    "idx": ("formats.arrays", "read_idx"),
    "images": ("formats.images", "read_images"),
    "text": ("formats.text", "read_text"),
    "libsvm": ("formats.libsvm", "read_libsvm"),
    "shards": ("shards.read", "read_shards"),
    "criteo": ("formats.public", "read_criteo"),
    "movielens": ("formats.public", "read_movielens"),
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
        import_module(f"echelon.data.{module}"), function
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


# --- parse ---
# Blocks → record batches, one file per format; what is bad is set aside with its line.
#
# A format cuts a file into blocks, says what columns a block has, and parses it. Good blocks are
# parsed whole; only one that holds something bad is read with care.


class Format(Protocol):
    """A module of this folder."""

    def cut(self, source: Source, size: int) -> Iterator[Block]: ...

    def infer(self, block: Block, types: Mapping[str, pa.DataType]) -> pa.Schema | None: ...

    def parse(self, block: Block, wanted: pa.Schema) -> Parsed: ...

    def count(self, block: Block) -> int:
        """How many records it has, readable or not."""


_MODULES = {
    "csv": "delimited",
    "tsv": "delimited",
    "jsonl": "jsonl",
    "parquet": "parquet",
    "text": "text",
    "documents": "text",
    "images": "images",
    "idx": "arrays",
    "libsvm": "libsvm",
}


def format_of(name: str) -> Format:
    """The module of a format."""
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    found: Format = module.DOCUMENTS if name == "documents" else module
    return found


def infer(block: Block, columns: Mapping[str, str]) -> pa.Schema | None:
    """The columns of a block with their types, those named in `columns` as said there.

    None if nothing in it can be read: then the next block may say it.
    """
    if block.fault is not None:
        return None
    types = {name: _type(name, alias) for name, alias in columns.items()}
    found = format_of(block.source.format).infer(block, types)
    return wanted_schema(found, types) if found is not None else None


def _type(name: str, alias: str) -> Any:
    try:
        return arrow_type(f"columns.{name}", alias)
    except DataError as error:
        raise ConfigError(str(error), ("columns", name)) from None  # told with its line


def refuse_others(block: Block, columns: Mapping[str, str]) -> None:
    """Where a file says what columns it has, the type of another one is a mistake: it would make
    all records bad."""
    names = block.names if block.names is not None else columns
    for name in columns:
        if name not in names:
            told = unknown("column", name, names)
            raise ConfigError(f"columns: {block.file}: {told}", ("columns", name))


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    """The records of a block with the wanted columns, and what is bad.

    Every record is one or the other: `Parsed.read` of all blocks is what the inputs hold.
    """
    form = format_of(block.source.format)
    if block.fault is None:
        return form.parse(block, wanted)
    if block.broken is None:
        return whole_block(block, wanted, block.fault, form.count(block), line=1)
    return whole_block(block, wanted, block.fault, block.broken)


# --- blocks ---


def blocks(inputs: Sequence[Input], size: int = SIZE) -> Iterator[Block]:
    """All blocks of all inputs, in order."""
    number = 0
    for source in sources(inputs):
        for block in blocks_of(source, size):
            yield dataclasses.replace(block, number=number)
            number += 1


def blocks_of(source: Source, size: int = SIZE) -> Iterator[Block]:
    """The blocks of one file or folder; each counts for itself."""

    return format_of(source.format).cut(source, size)
