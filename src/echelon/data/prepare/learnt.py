"""What a step or a feature has learnt, as plain data: kept, sent and loaded without pickle.

A value is a numpy array, an Arrow array of strings, or what JSON can hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError
from safetensors.numpy import load as _arrays_of
from safetensors.numpy import save as _bytes_of

from echelon.core.errors import DataError

Learnt: TypeAlias = dict[str, Any]

PLAIN, ARRAYS = "learnt.json", "learnt.safetensors"
_JSON, _STRINGS = "\x00json", "\x00strings "
"""Names that no key has: how a single file holds what is no array."""


def save(folder: Path, learnt: Learnt) -> None:
    """As files that people and other programs can read: words and numbers, and arrays."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays, strings, plain = _sorted_out(learnt)
    text = {"values": plain, "strings": {key: s.to_pylist() for key, s in strings.items()}}
    whole = json.dumps(text, ensure_ascii=False, indent=1, sort_keys=True, allow_nan=False)
    (folder / PLAIN).write_text(whole + "\n", encoding="utf-8")
    (folder / ARRAYS).write_bytes(_bytes_of(arrays))


def load(folder: Path) -> Learnt:
    """What `save` wrote; refuses what is not whole."""
    try:
        text = json.loads((folder / PLAIN).read_text(encoding="utf-8"))
        strings = {key: pa.array(s, pa.large_utf8()) for key, s in text["strings"].items()}
        return {**text["values"], **strings, **_arrays_of((folder / ARRAYS).read_bytes())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"{folder}: what was learnt cannot be read: {error}") from None


def pack(learnt: Learnt) -> bytes:
    """As one piece, quickly: how it passes between processes."""
    arrays, strings, plain = _sorted_out(learnt)
    for key, values in strings.items():
        arrays[_STRINGS + key] = np.frombuffer(_ipc(values), np.uint8)
    arrays[_JSON] = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    return _bytes_of(arrays)


def unpack(packed: bytes) -> Learnt:
    """What `pack` made."""
    learnt: Learnt = {}
    for key, array in _arrays_of(packed).items():
        if key == _JSON:
            learnt |= json.loads(array.tobytes())
        elif key.startswith(_STRINGS):
            with pa.ipc.open_stream(pa.py_buffer(array)) as stream:
                learnt[key.removeprefix(_STRINGS)] = stream.read_next_batch().column(0)
        else:
            learnt[key] = array
    return learnt


def _ipc(strings: Any) -> Any:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([strings], ["strings"])
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def _sorted_out(learnt: Learnt) -> tuple[dict[str, Any], dict[str, Any], Learnt]:
    """Arrays, Arrow's strings, and the rest."""
    arrays: dict[str, Any] = {}
    strings: dict[str, Any] = {}
    plain: Learnt = {}
    for key, value in learnt.items():
        if isinstance(value, np.ndarray | np.generic):
            arrays[key] = np.ascontiguousarray(value).reshape(np.shape(value))
        elif isinstance(value, pa.Array | pa.ChunkedArray):
            whole = value.combine_chunks() if isinstance(value, pa.ChunkedArray) else value
            strings[key] = whole.cast(pa.large_utf8())
        else:
            plain[key] = value
    return arrays, strings, plain
