"""Plain text, one record per line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from echelon.data.prepare import scan
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.cutting import cut_text
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.parse.fit import conform
from echelon.data.prepare.parse.parsed import (
    Bad,
    Parsed,
    is_utf8,
    lacking,
    shown,
    valid,
    whole_block,
)


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
