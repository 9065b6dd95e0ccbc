"""JSON lines, parsed by pyarrow.json: one object per line; a key that is absent is a missing value.

The block parser (`cut`, `count`, `infer`, `parse`) serves recipes. It parses a good block in one
call of Arrow; for a block with anything bad in it, `Sieve` finds the bad lines. The strict reader
`read_jsonl` serves jobs without a recipe: it streams a file through Arrow and raises the first
error, with a line counted from the records read.

Arrow's parser trusts its input: it crashes on a line `null`, follows brackets by recursion, takes
`{}{}` for two records, and does not check that text is UTF-8. Each reader guards against this
itself.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

from echelon.core.errors import DataError, unknown
from echelon.data.formats import scan
from echelon.data.formats.cutting import cut_into_lines
from echelon.data.formats.records import (
    Block,
    Parsed,
    Sieve,
    Source,
    all_utf8,
    fit,
    one_batch,
    shown,
)
from echelon.data.formats.streams import BLOCK, CHUNK, open_native, open_stream

# Block parser


def cut(source: Source, size: int) -> Iterator[Block]:
    return cut_into_lines(source, size)


def count(block: Block) -> int:
    return len(_spans(block.content()).starts)


def infer(block: Block, types: Mapping[str, Any]) -> pa.Schema | None:  # noqa: ARG001
    data = block.content()
    found = _inferred(data, _spans(data))
    chosen = block.source.options.columns
    if found is None or chosen is None:
        return found
    for name in chosen:
        if name not in found.names:
            raise DataError(f"{block.file}: {unknown('column', name, found.names)}")
    return pa.schema([found.field(name) for name in chosen])


def _inferred(data: bytes, spans: scan.Spans) -> pa.Schema | None:
    """Infer the types of all keys; return None if no record can be read."""
    if _all_objects(data, spans) and all_utf8(data) and _deepest(data, spans) <= _DEEPEST:
        try:
            return read_objects(data, None).schema
        except _REFUSED:
            pass  # some record is bad or differs: look at each record
    return _majority_schema(data, spans)


def _deepest(data: bytes, spans: scan.Spans) -> int:
    """Return the largest number of opening brackets in a line."""
    opens = np.concatenate([scan.places(data, ord("[")), scan.places(data, ord("{"))])
    return int(np.bincount(np.searchsorted(spans.ends, opens)).max())


_DEEPEST = 500
"""Opening brackets of a record, at most, for it to take part in the inference of types."""


def _majority_schema(data: bytes, spans: scan.Spans) -> pa.Schema | None:
    """Infer the types from the records that can be read; a key gets its most frequent kind."""
    lines = [data[s:e] for s, e in zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)]
    shallow = [line for line in lines if line.count(b"[") + line.count(b"{") <= _DEEPEST]
    objects = (json.loads(line) for line in shallow if not_an_object(line) is None)
    records = [record for record in objects if _can_be_written(record)]
    kinds = _most_frequent_kinds(records)
    like = [
        {key: value for key, value in record.items() if _kind(value) == kinds[key]}
        for record in records
    ]
    if not like:
        return None
    found = _types(like)
    return found if found is not None else _key_by_key(like)


def _can_be_written(record: dict[str, Any]) -> bool:
    """Return whether UTF-8 can encode a record: JSON allows half of a surrogate pair."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _most_frequent_kinds(records: list[dict[str, Any]]) -> Mapping[str, str]:
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for key, value in record.items():
            seen[key][_kind(value)] += value is not None
    return {key: kinds.most_common(1)[0][0] for key, kinds in seen.items()}


def _kind(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__


def _types(records: Iterable[dict[str, Any]]) -> pa.Schema | None:
    try:
        return read_objects("\n".join(map(json.dumps, records)).encode(), None).schema
    except _REFUSED:
        return None


def _key_by_key(records: list[dict[str, Any]]) -> pa.Schema | None:
    """Infer each key alone; if its values have no common type, the first readable one decides."""
    fields: list[Any] = []
    for key in dict.fromkeys(key for record in records for key in record):
        values = [{key: record[key]} for record in records if record.get(key) is not None]
        values = values or [{key: None}]
        tries = (_types(some) for some in (values, *([one] for one in values[:_TRIED])))
        fields += next((found for found in tries if found is not None), ())
    return pa.schema(fields) if fields else None


_TRIED = 100
"""Values of a key that are tried one by one if all of them together have no common type."""


def parse(block: Block, wanted: pa.Schema) -> Parsed:
    data = block.content()
    spans = _spans(data)
    if _all_objects(data, spans) and all_utf8(data):
        batch = _read(data, wanted)
        if batch is not None and batch.num_rows == len(spans.starts):
            return Parsed(batch, block.record + spans.lines)
    sieve = Sieve(
        data, spans, lambda joined: _read(joined, wanted), lambda one: _refusal(one, wanted)
    )
    # Arrow must not see these: it crashes on some and takes others for several records.
    sieve.try_alone(lambda record: not_an_object(record) is not None)
    return sieve.parsed(block, wanted)


def _spans(data: bytes) -> scan.Spans:
    return scan.nonblank(data, scan.spans(data, None, False))


def _all_objects(data: bytes, spans: scan.Spans) -> bool:
    """Return whether every line begins with `{` and ends with `}`."""
    values = np.frombuffer(data, np.uint8)
    opens, closes = values[spans.starts] == ord("{"), values[spans.ends - 1] == ord("}")
    return bool(len(opens) and opens.all() and closes.all())


def _read(data: bytes, wanted: pa.Schema) -> Any | None:
    """Return the wanted columns, or None if Arrow refuses a record or a value does not fit."""
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
    """Return the type that Arrow's JSON parser supports: its lists have 32-bit offsets."""
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


def not_an_object(record: bytes) -> str | None:
    """Return the reason why a line is not a JSON object, or None if it is one."""
    try:
        value = json.loads(record.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except json.JSONDecodeError as error:
        return f"not JSON: {error.msg[0].lower()}{error.msg[1:]} at character {error.pos + 1}"
    except (RecursionError, ValueError) as error:
        return f"not JSON that can be read: {error}"
    return None if isinstance(value, dict) else f"not a JSON object but {shown(str(value), 60)!r}"


def read_objects(data: bytes, schema: pa.Schema | None) -> Any:
    """Parse objects into a batch; with a schema, ignore keys that it does not name."""
    others = "infer" if schema is None else "ignore"
    options = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)

    def read(chunk: int) -> Any:
        how = pa.json.ReadOptions(use_threads=False, block_size=chunk)
        return one_batch(pa.json.read_json(pa.BufferReader(data), how, options))

    try:
        return read(_CHUNK)
    except pa.ArrowInvalid as error:
        if len(data) <= _CHUNK or "straddl" not in str(error):
            raise
        return read(len(data) + 1)


_CHUNK = 1 << 20
_REFUSED = (pa.ArrowInvalid, pa.ArrowNotImplementedError)


# Strict reader

_INDEX = re.compile(r"at string index (\d+)")
_ROW = re.compile(r" in row (\d+)$")
_NO_OBJECT = re.compile(rb"\n[ \t\r]*+([^ \t\r\n{])")


def read_jsonl(path: Path, *, block: int = BLOCK) -> Iterator[Any]:
    """Yield the record batches of a file; its keys are the columns, an absent key is a null."""
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
            raise DataError(_message(path, str(error).splitlines()[0], rows)) from None


def _only_objects(path: Path) -> None:
    """Refuse a file with a line that does not begin with `{`: Arrow's parser crashes on `null`."""
    lines, rest = 0, b"\n"
    with open_stream(path) as stream:
        while data := stream.read(CHUNK):
            data = rest + data
            if found := _NO_OBJECT.search(data):
                line = lines + data.count(b"\n", 0, found.start(1))
                raise DataError(f"{path}:{line}: not a JSON object like those before it")
            last = data.rfind(b"\n")
            # Whether the last line has begun with nothing but blanks so far: then keep it.
            begun = last >= 0 and not data[last:].strip()
            rest = data[last:] if begun else b""
            lines += data.count(b"\n") - begun


def _text_is_utf8(path: Path, batch: Any, rows: int) -> None:
    """Refuse text that is not UTF-8: Arrow's parser does not check it."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            index = _INDEX.search(str(error))
            line = rows + int(index[1]) + 1 if index and pa.types.is_string(field.type) else rows
            raise DataError(f"{path}:{line}: {field.name!r} is not UTF-8") from None


def _message(path: Path, message: str, rows: int) -> str:
    """Return Arrow's message with its line number moved to the front: `FILE:LINE: reason`."""
    if "Empty JSON" in message:
        return f"{path}: empty"
    row = _ROW.search(message)
    line = rows + int(row[1]) + 1 if row else rows + 1
    message = _ROW.sub("", message.removeprefix("JSON parse error: ")).rstrip(".")
    return f"{path}:{line}: not a JSON object like those before it: {message}"
