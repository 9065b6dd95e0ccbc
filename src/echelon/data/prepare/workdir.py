"""Results that are whole or absent; fitted state; quarantine records."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from safetensors import SafetensorError
from safetensors.numpy import load as _arrays_of
from safetensors.numpy import save as _bytes_of

from echelon.core.errors import DataError
from echelon.core.files import write_atomic

# --- desk ---
# The folder that work in progress lies in: every result is whole or not there.

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_STATE, _LOCK = "state.json", "lock"
_LAYOUT = 3
"""Of what lies here: what another release has begun is begun anew."""


class Desk:
    """Files by stage and number. A result (`.json`) is written last: where it is, all is."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, stage: str, number: int, suffix: str) -> Path:
        return self.root / stage / f"{number:06d}.{suffix}"

    def stage(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, stage: str, number: int, result: Any) -> Any:
        write_atomic(self.path(stage, number, "json"), json.dumps(result).encode())
        return result

    def result(self, stage: str, number: int) -> Any | None:
        """What `finish` was given, if it was."""
        return _read(self.path(stage, number, "json"))

    def remember(self, name: str, value: Any) -> Any:
        write_atomic(self.root / f"{name}.json", json.dumps(value).encode())
        return value

    def recall(self, name: str) -> Any | None:
        return _read(self.root / f"{name}.json")

    def clear(self, *stages: str) -> None:
        for stage in stages:
            shutil.rmtree(self.root / stage, ignore_errors=True)

    def remove(self, stage: str, suffix: str) -> None:
        """What nobody will read again."""
        for path in (self.root / stage).glob(f"*.{suffix}"):
            path.unlink(missing_ok=True)


class Claim:
    """A desk that is ours: nobody else works in it, and what lies there is of the same work."""

    def __init__(self, root: Path, digest: str) -> None:
        self.desk = Desk(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise DataError(f"{root}: {error.strerror}") from None
        try:
            self._lock()
            self.resumed = self._same(digest)
        except BaseException:
            os.close(self._handle)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(
                f"{self.desk.root}: another process is preparing this folder now"
            ) from None

    def _same(self, digest: str) -> bool:
        """Keep what was done for the same digest, unless the machine fell and files may be torn."""
        state = {"digest": digest, "boot": _boot(), "layout": _LAYOUT}
        if self.desk.recall("state") == state:
            return True
        for entry in self.desk.root.iterdir():
            if entry.name != _LOCK:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.desk.remember("state", state)
        return False

    def close(self, *, remove: bool) -> None:
        if remove:
            shutil.rmtree(self.desk.root, ignore_errors=True)
        os.close(self._handle)


def _boot() -> str:
    with suppress(OSError):
        return _BOOT.read_text(encoding="utf-8").strip()
    return ""


def _read(path: Path) -> Any | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


# --- learnt ---
# What a step or a feature has learnt, as plain data: kept, sent and loaded without pickle.
#
# A value is a numpy array, an Arrow array of strings, or what JSON can hold.

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


# --- quarantine ---
# Records that are not used, each with its place and the reason: one JSON object per line.

READ, FILE = "read", "file"
"""What cannot be read: records; what is left of a file, from there on."""
_SHOWN = 500
"""Characters of a record that are shown."""


@dataclass(frozen=True, slots=True)
class Out:
    """Something that is not used."""

    file: str
    line: int
    reason: str
    record: str
    step: str
    records: int = 1
    """How many records it stands for: 0 where it is about a stream as a whole."""

    def to_line(self) -> bytes:
        plain: dict[str, Any] = {
            "file": self.file,
            "line": self.line,
            "step": self.step,
            "reason": self.reason,
        }
        if self.records != 1:
            plain["records"] = self.records
        return json.dumps(plain | {"record": self.record}, ensure_ascii=False).encode() + b"\n"


def told(
    place: Callable[[int], tuple[str, int]],
    block: pa.RecordBatch,
    rows: Sequence[tuple[int, str]],
    step: str,
) -> list[Out]:
    """These rows of a block, each with its place and its reason."""
    return [Out(*place(row), reason, _shown(block, row), step) for row, reason in rows]


def text_of(outs: Iterable[Out]) -> bytes:
    return b"".join(out.to_line() for out in outs)


def cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def counted(outs: Iterable[Out]) -> dict[str, int]:
    """How many records each step took out."""
    counts: dict[str, int] = {}
    for out in outs:
        counts[out.step] = counts.get(out.step, 0) + out.records
    return counts


def added(totals: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        totals[name] = totals.get(name, 0) + count


def _shown(block: pa.RecordBatch, row: int) -> str:
    values = {name: _plain(block.column(name)[row]) for name in block.schema.names}
    return cut(json.dumps(values, ensure_ascii=False, default=str))


def _plain(value: Any) -> Any:
    plain = value.as_py()
    if isinstance(plain, bytes):
        return f"{len(plain)} bytes"
    return cut(plain) if isinstance(plain, str) else plain


def first(outs: Iterable[Out]) -> Iterator[str]:
    """Of the first one, where it is and why, on one line."""
    for out in outs:
        yield f"{out.file}:{out.line}: {out.reason}"
        return
