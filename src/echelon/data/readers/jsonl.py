"""One JSON object per line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json

from echelon.core.errors import DataError
from echelon.data.readers.stream import CHUNK, open_native, open_stream

BLOCK = 32 << 20
_INDEX = re.compile(r"at string index (\d+)")
_ROW = re.compile(r" in row (\d+)$")
_NO_OBJECT = re.compile(rb"\n[ \t\r]*+([^ \t\r\n{])")


def read_jsonl(path: Path, *, block: int = BLOCK) -> Iterator[Any]:
    """Record batches of a file; its keys are the columns, a key that is absent is a null."""
    rows = 0
    _only_objects(path)
    with open_native(path) as stream:
        try:
            options = pa.json.ReadOptions(use_threads=False, block_size=block)
            with pa.json.open_json(stream, options) as reader:
                for batch in reader:
                    _text_is_utf8(path, batch, rows)
                    rows += batch.num_rows
                    yield batch
        except pa.ArrowException as error:
            raise DataError(_told(path, str(error).splitlines()[0], rows)) from None


def _only_objects(path: Path) -> None:
    """Arrow's parser does not survive a line that is anything else, such as `null`."""
    lines, rest = 0, b"\n"
    with open_stream(path) as stream:
        while data := stream.read(CHUNK):
            data = rest + data
            if found := _NO_OBJECT.search(data):
                line = lines + data.count(b"\n", 0, found.start(1))
                raise DataError(f"{path}:{line}: not a JSON object like those before it")
            last = data.rfind(b"\n")
            begun = last >= 0 and not data[last:].strip()  # a line, by nothing but blanks so far
            rest = data[last:] if begun else b""
            lines += data.count(b"\n") - begun


def _text_is_utf8(path: Path, batch: Any, rows: int) -> None:
    """Arrow's parser takes bytes as they come."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            index = _INDEX.search(str(error))
            line = rows + int(index[1]) + 1 if index and pa.types.is_string(field.type) else rows
            raise DataError(f"{path}:{line}: {field.name!r} is not UTF-8") from None


def _told(path: Path, message: str, rows: int) -> str:
    if "Empty JSON" in message:
        return f"{path}: empty"
    row = _ROW.search(message)
    line = rows + int(row[1]) + 1 if row else rows + 1
    message = _ROW.sub("", message.removeprefix("JSON parse error: ")).rstrip(".")
    return f"{path}:{line}: not a JSON object like those before it: {message}"
