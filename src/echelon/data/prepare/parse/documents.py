"""Texts of one file each; the folder they lie in is their class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.prepare import remote
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.parse.files import Unreadable, cut_files, parse_files
from echelon.data.prepare.parse.parsed import Parsed
from echelon.data.prepare.unpack import Damaged, packing, unpacked
from echelon.data.prepare.unreachable import Unreachable


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_files(source, size, "text")


def count(block: Block) -> int:
    return len(block.members)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    labels = [pa.field("label", pa.large_utf8())] if block.members[0][1] is not None else []
    return pa.schema([pa.field("text", pa.large_utf8()), *labels])


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    return parse_files(block, wanted, "text", pa.large_utf8(), _text)


def _text(path: str) -> str:
    parts: list[bytes] = []
    try:
        with remote.open_binary(path) as file:
            parts.extend(unpacked(file, packing(remote.named(path).name)))
        text = b"".join(parts).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + b"".join(parts).count(b"\n", 0, error.start)
        raise Unreadable("not UTF-8", line) from None
    except Unreachable:
        raise
    except (Damaged, DataError) as error:
        raise Unreadable(str(error).removeprefix(f"{path}: ")) from None
    if not text:
        raise Unreadable("empty")
    return text
