"""The work folder of a preparation, and the two kinds of files in it that outlive the preparation.

    .NAME.work/                      beside the output folder NAME
      lock, state.json               Claim: one process at a time; the work belongs to one digest
      plan.json, fields.json, …      facts, by `remember` and `recall`
      PASS.json                      the results of a complete pass
      PASS/NUMBER.json               the result of one task: written last, so the task is done
      PASS/NUMBER.arrow, .jsonl, …   its files
      learnt/clean-0-1/              what a step or feature has learnt, after its first pass
      out/                           the output folder, until it is renamed

Every file is written aside and renamed, so it is whole or absent. Only the output is flushed to
disk: if the machine has been rebooted, everything is done again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class Desk:
    """Files by stage (a pass) and number (of a block or shard).

    A task's result, `.json`, is written last: if it exists, so do the task's other files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, stage: str, number: int, suffix: str) -> Path:
        return self.root / stage / f"{number:06d}.{suffix}"

    def stage(self, name: str) -> Path:
        """Return the folder of a stage; create it if necessary."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, stage: str, number: int, result: Any) -> Any:
        """Store the result of a task, and return it."""
        write_atomic(self.path(stage, number, "json"), json.dumps(result).encode())
        return result

    def result(self, stage: str, number: int) -> Any | None:
        """Return the result of a task, or None if it is not done."""
        return _read(self.path(stage, number, "json"))

    def remember(self, name: str, value: Any) -> Any:
        """Store a fact, and return it."""
        write_atomic(self.root / f"{name}.json", json.dumps(value).encode())
        return value

    def recall(self, name: str) -> Any | None:
        """Return a fact, or None if it is not stored."""
        return _read(self.root / f"{name}.json")

    def clear(self, *stages: str) -> None:
        """Delete whole stages."""
        for stage in stages:
            shutil.rmtree(self.root / stage, ignore_errors=True)

    def remove(self, stage: str, suffix: str) -> None:
        """Delete the files of a stage with this suffix; no later pass reads them."""
        for path in (self.root / stage).glob(f"*.{suffix}"):
            path.unlink(missing_ok=True)


class Claim:
    """Exclusive use of a work folder, which holds nothing but work on the same digest.

    Raise DataError if another process uses it. Work of another digest is deleted.
    """

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
        """Return whether the folder holds work of this digest; delete any other.

        Work from before a reboot is deleted too: files are not flushed, so they may be torn.
        """
        state = {"digest": digest, "boot": _boot(), "layout": _LAYOUT}
        if self.desk.recall("state") == state:
            return True
        for entry in self.desk.root.iterdir():
            if entry.name != _LOCK:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.desk.remember("state", state)
        return False

    def close(self, *, remove: bool) -> None:
        """Release the folder; `remove` deletes it first."""
        if remove:
            shutil.rmtree(self.desk.root, ignore_errors=True)
        os.close(self._handle)


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LAYOUT = 3
"""Version of the work folder's layout; work of another version is deleted."""
_LOCK = "lock"


def _boot() -> str:
    """Return an id that changes with every boot of the machine."""
    with suppress(OSError):
        return _BOOT.read_text(encoding="utf-8").strip()
    return ""


def _read(path: Path) -> Any | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


# What steps and features have learnt, as plain data


Learnt: TypeAlias = dict[str, Any]
"""A value is a numpy array, an Arrow array of strings, or what JSON can hold: no pickle."""


def save(folder: Path, learnt: Learnt) -> None:
    """Write JSON for text and numbers and safetensors for arrays: readable by other programs."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays, strings, plain = _sorted_out(learnt)
    text = {"values": plain, "strings": {key: s.to_pylist() for key, s in strings.items()}}
    whole = json.dumps(text, ensure_ascii=False, indent=1, sort_keys=True, allow_nan=False)
    (folder / PLAIN).write_text(whole + "\n", encoding="utf-8")
    (folder / ARRAYS).write_bytes(_bytes_of(arrays))


def load(folder: Path) -> Learnt:
    """Return what `save` wrote; raise DataError if it is incomplete."""
    try:
        text = json.loads((folder / PLAIN).read_text(encoding="utf-8"))
        strings = {key: pa.array(s, pa.large_utf8()) for key, s in text["strings"].items()}
        return {**text["values"], **strings, **_arrays_of((folder / ARRAYS).read_bytes())}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise DataError(f"{folder}: what was learnt cannot be read: {error}") from None


def pack(learnt: Learnt) -> bytes:
    """Serialize to bytes, fast: the form in which workers pass partial results to the parent."""
    arrays, strings, plain = _sorted_out(learnt)
    for key, values in strings.items():
        arrays[_STRINGS + key] = np.frombuffer(_ipc(values), np.uint8)
    arrays[_JSON] = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    return _bytes_of(arrays)


def unpack(packed: bytes) -> Learnt:
    """Return what `pack` serialized."""
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


def _sorted_out(learnt: Learnt) -> tuple[dict[str, Any], dict[str, Any], Learnt]:
    """Return the numpy arrays, the Arrow strings and the rest."""
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


def _ipc(strings: Any) -> Any:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([strings], ["strings"])
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


PLAIN, ARRAYS = "learnt.json", "learnt.safetensors"
_JSON, _STRINGS = "\x00json", "\x00strings "
"""Names of arrays that hold something else; no key begins with a NUL."""


# Quarantine: records that are taken out or flagged


@dataclass(frozen=True, slots=True)
class Out:
    """A record that was taken out or flagged: one line of quarantine.jsonl or noted.jsonl."""

    file: str
    line: int
    reason: str
    record: str
    step: str
    records: int = 1
    """The number of records it stands for; 0 if it is about a file as a whole."""

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


READ, FILE = "read", "file"
"""Values of `step` for what cannot be read: a record; the rest of a file."""


def told(
    place: Callable[[int], tuple[str, int]],
    block: pa.RecordBatch,
    rows: Sequence[tuple[int, str]],
    step: str,
) -> list[Out]:
    """Return quarantine records for rows of a block; `place` finds the file and line of a row."""
    return [Out(*place(row), reason, _shown(block, row), step) for row, reason in rows]


def text_of(outs: Iterable[Out]) -> bytes:
    """Return one JSON line per record."""
    return b"".join(out.to_line() for out in outs)


def counted(outs: Iterable[Out]) -> dict[str, int]:
    """Return how many records each step took out."""
    counts: dict[str, int] = {}
    for out in outs:
        counts[out.step] = counts.get(out.step, 0) + out.records
    return counts


def added(totals: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts to `totals`, in place."""
    for name, count in more.items():
        totals[name] = totals.get(name, 0) + count


def first(outs: Iterable[Out]) -> str:
    """Return place and reason of the first one, or an empty text."""
    return next((f"{out.file}:{out.line}: {out.reason}" for out in outs), "")


def cut(text: str) -> str:
    """Shorten a text to what is shown of a record."""
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


_SHOWN = 500
"""Characters of a record that the quarantine shows at most."""


def _shown(block: pa.RecordBatch, row: int) -> str:
    values = {name: _plain(block.column(name)[row]) for name in block.schema.names}
    return cut(json.dumps(values, ensure_ascii=False, default=str))


def _plain(value: Any) -> Any:
    plain = value.as_py()
    if isinstance(plain, bytes):
        return f"{len(plain)} bytes"
    return cut(plain) if isinstance(plain, str) else plain
