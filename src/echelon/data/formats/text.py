"""Lines, or one document per file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.formats import remote, scan
from echelon.data.formats.blocks import (
    Damaged,
    cut_text,
    decode,
    open_stream,
    packing,
    plain_name,
    read_bytes,
    unpacked,
)
from echelon.data.formats.files import TEXT_SUFFIXES, members
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
from echelon.data.formats.remote import Unreachable

# --- lines ---
# Plain text, one record per line.


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_text(source, size, lambda data, last: (scan.cut_lines(data, last), False))


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
    text = texts(data, spans)
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


def texts(data: bytes, spans: scan.Spans) -> Any:
    """The records as a column, not looked into."""
    lengths = spans.ends - spans.starts
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    kept = data.translate(None, b"\r\n")
    if len(kept) != offsets[-1]:  # there were returns within lines
        kept = b"".join([data[s:e] for s, e in zip(spans.starts, spans.ends, strict=True)])
    return pa.Array.from_buffers(
        pa.large_utf8(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(kept)]
    )


def _spans(data: bytes) -> scan.Spans:
    return scan.spans(data, None, False)


# --- parse/documents ---
# Texts of one file each; the folder they lie in is their class.


def cut_documents(source: Source, size: int) -> Iterator[Block]:
    return cut_files(source, size, "text")


def count_documents(block: Block) -> int:
    return len(block.members)


def infer_documents(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    labels = [pa.field("label", pa.large_utf8())] if block.members[0][1] is not None else []
    return pa.schema([pa.field("text", pa.large_utf8()), *labels])


def parse_documents(block: Block, wanted: pa.Schema) -> Parsed:
    return parse_files(block, wanted, "text", pa.large_utf8(), _text)


DOCUMENTS = SimpleNamespace(
    cut=cut_documents, count=count_documents, infer=infer_documents, parse=parse_documents
)
"""A format of its own beside that of lines."""


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


# --- files ---
# Folders whose files are records.


class Unreadable(Exception):
    """A file that is no record; the message says why."""

    def __init__(self, reason: str, line: int = 1) -> None:
        super().__init__(reason)
        self.line = line


def cut_files(source: Source, size: int, kind: str, most: int | None = None) -> Iterator[Block]:
    """Blocks of files one after the other, of about this many bytes and at `most` so many."""
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


def parse_files(
    block: Block, wanted: pa.Schema, name: str, kind: Any, load: Callable[[str], Any]
) -> Parsed:
    """One column of what was loaded, and the classes; `line` counts the files of the folder."""
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


def _block(source: Source, done: int, chosen: list[tuple[str, str | None]]) -> Block:
    files = tuple(chosen)
    return Block(0, source.file, done, len(files), done + 1, source, members=files)


# --- readers/documents ---
# Plain texts: one document per file, or one per line.

_LINES = 65_536
_FILES = 4096


def read_text(path: Path, *, per: Literal["file", "line"] | None = None) -> Iterator[Any]:
    """Record batches with `text` and, for files in class folders, `label`.

    `per` says what one document is: a file (usual for a folder) or a line (usual for a file).
    """
    files, labels = text_files(path) if path.is_dir() else ([path], [])
    if (per or ("file" if path.is_dir() else "line")) == "line":
        for number, file in enumerate(files):
            for lines in _lines(file):
                label = [labels[number]] * len(lines) if labels else []
                yield _batch(lines, label)
        return
    for start in range(0, len(files), _FILES):
        texts = [decode(read_bytes(file), file) for file in files[start : start + _FILES]]
        yield _batch(texts, labels[start : start + _FILES])


def text_files(path: Path) -> tuple[list[Path], list[str]]:
    """All texts in order, and the class of each if they lie in class folders."""
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
