"""The journal of a run: one JSON line per event, appended, never changed, readable after a crash.

    {"kind": "committed", "time": 1754.2, "generation": 1, "epoch": 0, "start": 0, "stop": 640, …}

A line counts once its newline is written. A process that is killed while writing leaves at most one
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
"""The journal's name in a run's folder."""
_TAIL = 1 << 16
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class JournalError(TrainingError):
    """A line could not be written; the journal is unchanged."""


class Journal:
    """The writer of a run's journal. It takes no lock: one thread of one process writes."""

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
        """Append one line. When this returns, the kernel has it and a killed process keeps it."""
        entry = {"kind": kind, "time": round(time.time(), 3), **fields}
        line = _ENCODER.encode(entry).encode() + b"\n"
        try:
            _write(self._handle, line)
        except OSError as error:
            # Otherwise the next line would follow half a line.
            os.ftruncate(self._handle, self._length)
            raise JournalError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._length += len(line)

    def sync(self) -> None:
        """Wait until all lines are on disk, so that a power failure does not lose them."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be synced: {error.strerror}") from error

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every finished line in order; a journal that does not exist has none."""
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
    except ValueError:  # also raised for bytes that are not UTF-8
        raise DataError(f"{path}, line {number}: is damaged: not JSON") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise DataError(f"{path}, line {number}: is damaged: not an object with a kind")
    when = entry.get("time")
    if isinstance(when, bool) or not isinstance(when, int | float):
        raise DataError(f"{path}, line {number}: is damaged: it has no time")
    return entry


def _write(handle: int, line: bytes) -> None:
    """Write the whole line; a disk that is nearly full may accept it in parts."""
    left = memoryview(line)
    while left:
        left = left[os.write(handle, left) :]


def _whole_lines(handle: int) -> int:
    """Return how many bytes there are up to and including the last newline."""
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - _TAIL)
        found = os.pread(handle, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
