"""What happened in a run, line by line: appended, never changed, readable after any crash.

    {"kind": "committed", "time": 1754.2, "generation": 1, "epoch": 0, "start": 0, "stop": 640, …}

A line counts once its newline is there. Whoever is killed while writing leaves at most one
unfinished line at the end, which readers drop and the next writer cuts off.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from echelon.core.errors import DataError, TrainingError

JOURNAL = "journal.jsonl"
"""Its name in a run's folder."""
_TAIL = 1 << 16
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class JournalError(TrainingError):
    """A line could not be written; the journal is as it was before."""


class Journal:
    """Appends to a run's journal. It is not locked: one process writes, in one thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._handle = os.open(path, flags, 0o644)
        except OSError as error:
            raise JournalError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._length = _whole_lines(self._handle)
            os.ftruncate(self._handle, self._length)
        except OSError as error:
            self.close()
            raise JournalError(f"{path}: cannot be gone on with: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, kind: str, **fields: Any) -> None:
        """Append one line. It is the kernel's when this returns: our own death does not lose it."""
        entry = {"kind": kind, "time": round(time.time(), 3), **fields}
        line = _ENCODER.encode(entry).encode() + b"\n"
        try:
            _write(self._handle, line)
        except OSError as error:
            os.ftruncate(self._handle, self._length)  # or the next line would follow half of one
            raise JournalError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._length += len(line)

    def sync(self) -> None:
        """Wait until everything is on disk: then not even a power cut loses it."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be synced: {error.strerror}") from error

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Every line that was finished, in order; a journal that was never begun has none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _entry(path, number, line)


def _entry(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:  # what is not UTF-8 is one too
        raise DataError(f"{path}, line {number}: is damaged: not JSON") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise DataError(f"{path}, line {number}: is damaged: not an object with a kind")
    when = entry.get("time")
    if isinstance(when, bool) or not isinstance(when, int | float):
        raise DataError(f"{path}, line {number}: is damaged: it has no time")
    return entry


def _write(handle: int, line: bytes) -> None:
    """All of it; a disk that is getting full may take it in parts."""
    left = memoryview(line)
    while left:
        left = left[os.write(handle, left) :]


def _whole_lines(handle: int) -> int:
    """How many bytes there are up to the last newline."""
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - _TAIL)
        found = os.pread(handle, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
