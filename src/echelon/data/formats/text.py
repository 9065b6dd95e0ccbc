"""Plain text: one record per line, or (strict reader only) one per file.

`cut`, `count`, `infer` and `parse` are the block parser of lines, for recipes. `read_text` is the
strict reader of lines and of whole files, for jobs without a recipe. The block parser of whole
files is in `documents`. The readers differ on empty lines: the block parser skips them, the strict
reader returns them as empty texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.formats import scan
from echelon.data.formats.cutting import cut_into_lines
from echelon.data.formats.files import TEXT_SUFFIXES
from echelon.data.formats.records import (
    Bad,
    Block,
    Parsed,
    Source,
    conform,
    is_utf8,
    lacking,
    shown,
    valid,
    whole_block,
)
from echelon.data.formats.streams import decode, open_stream, plain_name, read_bytes

# Block parser of lines


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_into_lines(source, size)


def count(block: Block) -> int:
    return len(_spans(block.content()).starts)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    labels = [] if block.source.label is None else [pa.field("label", pa.large_utf8())]
    return pa.schema([pa.field("text", pa.large_utf8()), *labels])


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    names = ["text"] if block.source.label is None else ["text", "label"]
    if reason := lacking(wanted, names):
        return whole_block(block, wanted, reason, count(block))
    data = block.content()
    spans = _spans(data)
    lines = block.record + spans.lines
    text = _texts(data, spans)
    bad: list[Bad] = []
    if not valid(text):
        broken = np.array(
            [not is_utf8(data[s:e]) for s, e in zip(spans.starts, spans.ends, strict=True)]
        )
        bad = [
            Bad(block.file, int(lines[row]), "not UTF-8", shown(text[row].as_buffer().to_pybytes()))
            for row in np.flatnonzero(broken).tolist()
        ]
        text, lines = text.filter(pa.array(~broken)), lines[~broken]
    columns = {"text": text}
    if block.source.label is not None:
        columns["label"] = pa.repeat(pa.scalar(block.source.label, pa.large_utf8()), len(text))
    return conform(block, columns, lines, wanted, bad)


def _texts(data: bytes, spans: scan.Spans) -> Any:
    """Return the lines as a column without checking that they are UTF-8."""
    lengths = spans.ends - spans.starts
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    kept = data.translate(None, b"\r\n")
    if len(kept) != offsets[-1]:  # a carriage return stands within a line
        kept = b"".join([data[s:e] for s, e in zip(spans.starts, spans.ends, strict=True)])
    return pa.Array.from_buffers(
        pa.large_utf8(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(kept)]
    )


def _spans(data: bytes) -> scan.Spans:
    return scan.spans(data, None, False)


# Strict reader of lines and of whole files

_LINES = 65_536
"""Lines of a record batch, at most."""
_FILES = 4096
"""Files of a record batch, at most."""


def read_text(path: Path, *, per: Literal["file", "line"] | None = None) -> Iterator[Any]:
    """Yield record batches with `text` and, for files in class folders, `label`.

    `per` makes one record of each file (the default for a folder) or of each line (the default for
    a file).
    """
    files, labels = _text_files(path) if path.is_dir() else ([path], [])
    if (per or ("file" if path.is_dir() else "line")) == "line":
        for number, file in enumerate(files):
            for lines in _lines(file):
                label = [labels[number]] * len(lines) if labels else []
                yield _batch(lines, label)
        return
    for start in range(0, len(files), _FILES):
        texts = [decode(read_bytes(file), file) for file in files[start : start + _FILES]]
        yield _batch(texts, labels[start : start + _FILES])


def _text_files(path: Path) -> tuple[list[Path], list[str]]:
    """Return all text files in order, and the class of each if they are in class folders."""
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir())
    pairs = [(file, folder.name) for folder in folders for file in _texts_in(folder)]
    if pairs:
        return [file for file, _ in pairs], [label for _, label in pairs]
    loose = _texts_in(path)
    if not loose:
        raise DataError(f"{path}: holds no texts ({', '.join(TEXT_SUFFIXES)})")
    return loose, []


def _texts_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if plain_name(file).endswith(TEXT_SUFFIXES))


def _lines(path: Path) -> Iterator[list[str]]:
    done, some = 0, False
    with open_stream(path) as stream:
        while raw := stream.readlines(1 << 24):
            for start in range(0, len(raw), _LINES):
                part = raw[start : start + _LINES]
                texts = decode(b"".join(part), path, done + 1).split("\n")
                done += len(part)
                lines = [text.rstrip("\r") for text in texts[: len(part)]]
                some = True
                yield lines
    if not some:
        raise DataError(f"{path}: empty")


def _batch(texts: list[str], labels: list[str]) -> Any:
    columns = {"text": pa.array(texts, pa.large_utf8())}
    if labels:
        columns["label"] = pa.array(labels)
    return pa.record_batch(columns)
