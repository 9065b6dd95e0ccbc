"""One JSON object per line; a key that is absent is a missing value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from echelon.core.errors import DataError, unknown
from echelon.data.prepare import scan
from echelon.data.prepare.blocks import Block
from echelon.data.prepare.cutting import cut_text
from echelon.data.prepare.inputs import Source
from echelon.data.prepare.parse.fit import fit
from echelon.data.prepare.parse.objects import guessed, not_an_object, objects, read_objects
from echelon.data.prepare.parse.parsed import Parsed, all_utf8, shown
from echelon.data.prepare.parse.sieve import Sieve


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_text(source, size, lambda data, last: (scan.cut_lines(data, last), False))


def count(block: Block) -> int:
    return len(_spans(block.content()).starts)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    data = block.content()
    found = guessed(data, _spans(data))
    chosen = block.source.options.columns
    if found is None or chosen is None:
        return found
    for name in chosen:
        if name not in found.names:
            raise DataError(f"{block.file}: {unknown('column', name, found.names)}")
    return pa.schema([found.field(name) for name in chosen])


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    data = block.content()
    spans = _spans(data)
    if objects(data, spans) and all_utf8(data):
        batch = _read(data, wanted)
        if batch is not None and batch.num_rows == len(spans.starts):
            return Parsed(batch, block.record + spans.lines)
    sieve = Sieve(
        data, spans, lambda joined: _read(joined, wanted), lambda one: _refusal(one, wanted)
    )
    # Arrow must not see these: it dies of some, and takes others for several records.
    sieve.try_alone(lambda record: not_an_object(record) is not None)
    return sieve.parsed(block, wanted)


def _spans(data: bytes) -> scan.Spans:
    return scan.nonblank(data, scan.spans(data, None, False))


def _read(data: bytes, wanted: pa.Schema) -> Any | None:
    """The wanted columns as Arrow reads them; None if it does not."""
    plain = pa.schema([pa.field(field.name, _plain(field.type)) for field in wanted])
    try:
        columns = read_objects(data, plain).columns
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    arrays = []
    for field, column in zip(wanted, columns, strict=True):
        array, wrong = fit(column, field.type)
        if wrong.any():
            return None
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def _plain(kind: Any) -> Any:
    """The type as Arrow's parser knows it: its lists have short offsets."""
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(inner.name, _plain(inner.type)) for inner in kind])
    return kind


def _refusal(record: bytes, wanted: pa.Schema) -> str | None:
    if reason := not_an_object(record):
        return reason
    if _read(record, wanted) is not None:
        return None
    values = json.loads(record.decode())
    for field in wanted:
        alone = json.dumps({field.name: values.get(field.name)}).encode()
        if _read(alone, pa.schema([field])) is None:
            value = shown(str(values[field.name]), 60)
            return f"column {field.name!r} is {value!r}: not of type {field.type}"
    return "not JSON that can be read: a key stands twice, or a character is none"
