"""libsvm: `label index:value index:value … # comment` on every line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from echelon.data.prepare import scan
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.cutting import cut_text
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.parse.fit import conform
from echelon.data.prepare.parse.parsed import Parsed, lacking, whole_block
from echelon.data.prepare.parse.sieve import Sieve
from echelon.data.readers.libsvm import libsvm_schema, read_rows, refusal, uncommented


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_text(source, size, lambda data, last: (scan.cut_lines(data, last), False))


def count(block: Block) -> int:
    return len(_spans(uncommented(block.content())).starts)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    return libsvm_schema(block.source.options.width)


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    if reason := lacking(wanted, libsvm_schema(None).names):
        return whole_block(block, wanted, reason, count(block))
    options = block.source.options
    width, zero_based = options.width, options.zero_based
    data = uncommented(block.content())
    spans = _spans(data)

    def read(joined: bytes) -> Any | None:
        rows = read_rows(joined, width, zero_based)
        return None if rows is None else pa.record_batch(rows.columns())

    batch = read(data)
    if batch is None or batch.num_rows != len(spans.starts):
        sieve = Sieve(data, spans, read, lambda record: refusal(record, width, zero_based))
        parsed = sieve.parsed(block, libsvm_schema(None))
    else:
        parsed = Parsed(batch, block.record + spans.lines)
    columns = dict(zip(parsed.batch.schema.names, parsed.batch.columns, strict=True))
    return conform(block, columns, parsed.lines, wanted, parsed.bad)


def _spans(data: bytes) -> scan.Spans:
    return scan.nonblank(data, scan.spans(data, None, False))
