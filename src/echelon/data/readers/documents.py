"""Plain texts: one document per file, or one per line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from echelon.core.errors import DataError
from echelon.data.readers.stream import decode, open_stream, plain_name, read_bytes

SUFFIXES = (".txt", ".text")
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
        raise DataError(f"{path}: holds no texts ({', '.join(SUFFIXES)})")
    return loose, []


def _texts_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if plain_name(file).endswith(SUFFIXES))


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
