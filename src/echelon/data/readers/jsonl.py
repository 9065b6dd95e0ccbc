"""One JSON object per line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json

from echelon.core.errors import DataError
from echelon.data.readers.stream import open_native

BLOCK = 32 << 20
_ROW = re.compile(r" in row (\d+)$")


def read_jsonl(path: Path, *, block: int = BLOCK) -> Iterator[Any]:
    """Record batches of a file; its keys are the columns, a key that is absent is a null."""
    rows = 0
    with open_native(path) as stream:
        try:
            options = pa.json.ReadOptions(use_threads=False, block_size=block)
            with pa.json.open_json(stream, options) as reader:
                for batch in reader:
                    rows += batch.num_rows
                    yield batch
        except pa.ArrowException as error:
            raise DataError(_told(path, str(error).splitlines()[0], rows)) from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8, after line {rows}: {error.reason}") from None


def _told(path: Path, message: str, rows: int) -> str:
    if "Empty JSON" in message:
        return f"{path}: empty"
    row = _ROW.search(message)
    line = rows + int(row[1]) + 1 if row else rows + 1
    message = _ROW.sub("", message.removeprefix("JSON parse error: ")).rstrip(".")
    return f"{path}:{line}: not a JSON object like those before it: {message}"
