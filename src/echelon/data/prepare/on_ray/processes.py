"""The processes of a Ray that was started here: none of them outlives the work."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path


class Processes:
    """Those that were started with `mark` in their arguments, and all that these started."""

    def __init__(self, mark: str) -> None:
        self._handles: list[int] = []
        roots = [pid for pid in children(os.getpid()) if mark in arguments(pid)]
        for pid in below(roots):
            with suppress(ProcessLookupError):
                self._handles.append(os.pidfd_open(pid))

    def await_end(self, seconds: float) -> None:
        """Whoever is still there then is killed."""
        deadline = time.monotonic() + seconds
        for handle in self._handles:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([handle], [], [], left)[0]:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self._handles = []


def below(roots: list[int]) -> list[int]:
    found: list[int] = []
    while roots:
        found += roots
        roots = [child for pid in roots for child in children(pid)]
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def arguments(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""
