"""File formats: from a path to Arrow record batches.

Columns are numbers, text, lists, or fixed-shape tensors (images, vectors).

Most formats have two readers side by side, both in the file of the format:

    read() ───────────────────────────────▶ batches, or a DataError for the first bad record
    blocks() ─▶ Block ─ infer(), parse() ─▶ Parsed(batch, lines, bad): bad records are set aside

The strict reader (`read`, functions `read_<format>`) streams a local file or folder. It serves jobs
that train on raw files (`data.opening`), `echelon.data.read` and the first look of `inspect`.

The block parser serves recipes (`data.prepare`), and `inspect` for a file that the strict reader
refuses. It cuts the inputs, which may lie behind URLs, into blocks that worker processes parse
independently; every bad record goes to the quarantine with its line and a reason. Each of its
formats is a module with the four functions of `Format`. numpy, shards, criteo and movielens have
only a strict reader.

Files around the formats: `files` finds the inputs and detects their formats, `remote` opens URLs,
`streams` opens local files for strict readers, `cutting` cuts files into blocks, `scan` finds the
ends of records in text, `records` holds the types and the tools that all block parsers share.
"""

from __future__ import annotations

import dataclasses
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
    "blocks",
    "detect",
    "format_of",
    "infer",
    "parse",
    "read",
    "refuse_others",
]


# Strict readers

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
    """Return the record batches of a file or a folder, by the strict reader of its format.

    `options` are the keyword arguments of that reader. Iterating raises `DataError` at the first
    record that cannot be read.
    """
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
    """Refuse unknown options, and values that do not match the reader's type annotations."""
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
            # A ConfigError, not a DataError: the file is not at fault, so `inspect` must not
            # read it again with the block parser.
            raise ConfigError(
                f"option {option} is {value!r}: {rule[0].lower()}{rule[1:]}"
            ) from None


# Block parsers


def blocks(inputs: Sequence[Input], size: int = SIZE) -> Iterator[Block]:
    """Cut all inputs into blocks of about `size` bytes, numbered in order."""
    number = 0
    for source in sources(inputs):
        for block in format_of(source.format).cut(source, size):
            yield dataclasses.replace(block, number=number)
            number += 1


def infer(block: Block, columns: Mapping[str, str]) -> pa.Schema | None:
    """Return the schema of a block; `columns` sets the types of some columns by name.

    Return None if no record of the block can be read; the caller then tries the next block.
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
        raise ConfigError(str(error), ("columns", name)) from None  # the key path gives its line


def refuse_others(block: Block, columns: Mapping[str, str]) -> None:
    """Refuse a type that the recipe sets for a column which the file does not have.

    Without this check every record of the file would be bad. Formats that learn their columns only
    from the records (`block.names` is None) are not checked.
    """
    names = block.names if block.names is not None else columns
    for name in columns:
        if name not in names:
            reason = unknown("column", name, names)
            raise ConfigError(f"columns: {block.file}: {reason}", ("columns", name))


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    """Return the records of a block: the good ones with the columns `wanted`, and the bad ones.

    Every record is either good or bad, so `Parsed.read` summed over all blocks is the number of
    records of the inputs.
    """
    form = format_of(block.source.format)
    if block.fault is None:
        return form.parse(block, wanted)
    if block.broken is None:
        return whole_block(block, wanted, block.fault, form.count(block), line=1)
    return whole_block(block, wanted, block.fault, block.broken)


def format_of(name: str) -> Format:
    """Return the block parser of a format."""
    module: Any = import_module(f"{__name__}.{_MODULES[name]}")
    parser: Format = module
    return parser


_MODULES = {
    "csv": "delimited",
    "tsv": "delimited",
    "jsonl": "jsonl",
    "parquet": "parquet",
    "text": "text",
    "documents": "documents",
    "images": "images",
    "idx": "arrays",
    "libsvm": "libsvm",
}


class Format(Protocol):
    """The block parser of a format: a module of this folder with these four functions."""

    def cut(self, source: Source, size: int) -> Iterator[Block]:
        """Cut one source into blocks of about `size` bytes, all numbered 0.

        What cannot be read at all becomes a block with a `fault`.
        """

    def infer(self, block: Block, types: Mapping[str, pa.DataType]) -> pa.Schema | None:
        """Return the schema of a block, or None if no record of it can be read.

        `types` are the types that the recipe sets. The present formats ignore them, because
        `wanted_schema` puts them in afterwards.
        """

    def parse(self, block: Block, wanted: pa.Schema) -> Parsed:
        """Return the good records of a block with the columns `wanted`, and its bad records."""

    def count(self, block: Block) -> int:
        """Return the number of records in a block, readable or not."""
