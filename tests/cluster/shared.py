"""Helpers for tests and the members they start to share values."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE = 60.0
SOON = 12.0
"""Seconds in which a run has ended on a busy machine; 5 s are promised on an idle one, and
without a fault noticed it goes on for 60."""


class Counters:
    """Numbers that all processes forked later can read and write."""

    def __init__(self, count: int) -> None:
        self._view = memoryview(mmap.mmap(-1, 8 * count)).cast("q")

    def __getitem__(self, at: int) -> int:
        return self._view[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._view[at] = value

    def list(self) -> list[int]:
        return self._view.tolist()


def wait_for(what: Callable[[], object], seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Whether this process still runs: one that has ended and was not reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def start(script: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    """Begin a Python script that can be signalled from outside."""
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )
