"""Blocks → record batches, one file per format; what is bad is set aside with its line.

A format cuts a file into blocks, says what columns a block has, and parses it. Good blocks are
parsed whole; only one that holds something bad is read with care.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import pyarrow as pa

from echelon.core.errors import ConfigError, DataError, unknown
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.parse.parsed import Bad, Parsed, whole_block
from echelon.data.prepare.parse.types import arrow_type, wanted_schema

__all__ = ["Bad", "Parsed", "arrow_type", "format_of", "infer", "parse", "refuse_others"]


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
    "text": "lines",
    "documents": "documents",
    "images": "images",
    "idx": "idx",
    "libsvm": "libsvm",
}


def format_of(name: str) -> Format:
    """The module of a format."""
    module: Format = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return module


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
