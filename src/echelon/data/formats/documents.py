"""Folders whose files are records; texts of one file each.

`cut_files` and `parse_files` serve every such format: this one and `images`. A block lists files,
the worker that parses it loads them one by one, and the name of a record's folder is its class.

This file has only a block parser: the strict reader of whole texts is `text.read_text`, which
shares its code with texts of one line each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.formats import remote
from echelon.data.formats.cutting import Damaged, packing, unpacked
from echelon.data.formats.files import members
from echelon.data.formats.records import Bad, Block, Parsed, Source, conform, lacking, whole_block
from echelon.data.formats.remote import Unreachable


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_files(source, size, "text")


def count(block: Block) -> int:
    return len(block.members)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    labels = [pa.field("label", pa.large_utf8())] if block.members[0][1] is not None else []
    return pa.schema([pa.field("text", pa.large_utf8()), *labels])


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    return parse_files(block, wanted, "text", pa.large_utf8(), _load_text)


def _load_text(path: str) -> str:
    parts: list[bytes] = []
    try:
        with remote.open_binary(path) as file:
            parts.extend(unpacked(file, packing(remote.named(path).name)))
        text = b"".join(parts).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + b"".join(parts).count(b"\n", 0, error.start)
        raise Unreadable("not UTF-8", line) from None
    except Unreachable:
        raise  # a server that fails ends the preparation; it does not make a record bad
    except (Damaged, DataError) as error:
        raise Unreadable(str(error).removeprefix(f"{path}: ")) from None
    if not text:
        raise Unreadable("empty")
    return text


# Tools for every format whose records are files


def cut_files(source: Source, size: int, kind: str, most: int | None = None) -> Iterator[Block]:
    """Group consecutive files into blocks of about `size` bytes and at most `most` files.

    `kind` is `text` or `images`.
    """
    chosen: list[tuple[str, str | None]] = []
    volume, done = 0, 0
    for (name, weight, _), label in members(source.file, kind):
        if chosen and (volume + weight > size or len(chosen) == most):
            yield _block(source, done, chosen)
            done, chosen, volume = done + len(chosen), [], 0
        chosen.append((name, label))
        volume += weight
    if chosen:
        yield _block(source, done, chosen)


def _block(source: Source, done: int, chosen: list[tuple[str, str | None]]) -> Block:
    files = tuple(chosen)
    return Block(0, source.file, done, len(files), done + 1, source, members=files)


def parse_files(
    block: Block, wanted: pa.Schema, name: str, kind: Any, load: Callable[[str], Any]
) -> Parsed:
    """Load every file of a block into the column `name`, of type `kind`, beside its class.

    `load` raises `Unreadable` for a file that is a bad record. `Parsed.lines` counts the files of
    the folder, from 1.
    """
    labelled = block.members[0][1] is not None
    if reason := lacking(wanted, [name, "label"] if labelled else [name]):
        return whole_block(block, wanted, reason, len(block.members))
    values, labels, lines = [], [], []
    bad: list[Bad] = []
    for number, (path, label) in enumerate(block.members, block.record):
        try:
            values.append(load(path))
        except Unreadable as error:
            bad.append(Bad(path, error.line, str(error)))
            continue
        labels.append(label)
        lines.append(number)
    columns = {name: pa.array(values, kind)}
    if labelled:
        columns["label"] = pa.array(labels, pa.large_utf8())
    return conform(block, columns, np.array(lines, np.int64), wanted, bad)


class Unreadable(Exception):
    """A file that cannot be a record; the message is the reason."""

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line
