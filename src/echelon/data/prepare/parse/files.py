"""Folders whose files are records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.data.prepare.blocks import Block
from echelon.data.prepare.inputs import Source, members
from echelon.data.prepare.parse.fit import conform
from echelon.data.prepare.parse.parsed import Bad, Parsed, lacking, whole_block


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
