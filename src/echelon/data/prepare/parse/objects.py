"""JSON objects → columns, by Arrow's parser; and what it must not be given.

Arrow's parser trusts its input: it dies of a line `null`, follows brackets by recursion, takes
`{}{}` for two records and does not look whether text is UTF-8.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

from echelon.data.prepare import scan
from echelon.data.prepare.parse.parsed import all_utf8, one_batch, shown

_CHUNK = 1 << 20
_DEEPEST = 500
"""Brackets of a record whose types are looked at."""
_TRIED = 100
"""Values that are looked at one by one, where together they have no type."""
_REFUSED = (pa.ArrowInvalid, pa.ArrowNotImplementedError)


def objects(data: bytes, spans: scan.Spans) -> bool:
    """Whether every line has the brackets of an object around it."""
    values = np.frombuffer(data, np.uint8)
    opens, closes = values[spans.starts] == ord("{"), values[spans.ends - 1] == ord("}")
    return bool(len(opens) and opens.all() and closes.all())


def not_an_object(record: bytes) -> str | None:
    """What is wrong with a line as JSON; None if it is an object."""
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
    """Objects as a batch; with a schema, keys that are not in it are passed over."""
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


def guessed(data: bytes, spans: scan.Spans) -> pa.Schema | None:
    """The types of all keys by what is in them; None if no record can be read."""
    if objects(data, spans) and all_utf8(data) and _deepest(data, spans) <= _DEEPEST:
        try:
            return read_objects(data, None).schema
        except _REFUSED:
            pass  # then with care
    return _careful(data, spans)


def _careful(data: bytes, spans: scan.Spans) -> pa.Schema | None:
    """The same from the records that can be read, each key by the kind most of them have."""
    lines = [data[s:e] for s, e in zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)]
    shallow = [line for line in lines if line.count(b"[") + line.count(b"{") <= _DEEPEST]
    objects = (json.loads(line) for line in shallow if not_an_object(line) is None)
    records = [record for record in objects if _can_be_written(record)]
    kinds = _majority(records)
    like = [
        {key: value for key, value in record.items() if _kind(value) == kinds[key]}
        for record in records
    ]
    if not like:
        return None
    found = _types(like)
    return found if found is not None else _key_by_key(like)


def _can_be_written(record: dict[str, Any]) -> bool:
    """Whether all of it is text: half of a surrogate pair is JSON, but no character."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _types(records: Iterable[dict[str, Any]]) -> pa.Schema | None:
    try:
        return read_objects("\n".join(map(json.dumps, records)).encode(), None).schema
    except _REFUSED:
        return None


def _key_by_key(records: list[dict[str, Any]]) -> pa.Schema | None:
    """Where values differ further within, a key is what the first of them is that can be read."""
    fields: list[Any] = []
    for key in dict.fromkeys(key for record in records for key in record):
        values = [{key: record[key]} for record in records if record.get(key) is not None]
        values = values or [{key: None}]
        tries = (_types(some) for some in (values, *([one] for one in values[:_TRIED])))
        fields += next((found for found in tries if found is not None), ())
    return pa.schema(fields) if fields else None


def _deepest(data: bytes, spans: scan.Spans) -> int:
    """Brackets opened in the line that opens most."""
    opens = np.concatenate([scan.places(data, ord("[")), scan.places(data, ord("{"))])
    return int(np.bincount(np.searchsorted(spans.ends, opens)).max())


def _majority(records: list[dict[str, Any]]) -> Mapping[str, str]:
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        for key, value in record.items():
            seen[key][_kind(value)] += value is not None
    return {key: kinds.most_common(1)[0][0] for key, kinds in seen.items()}


def _kind(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__
