"""Who runs a run, and whether that process is still there."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

_STATE, _START = 0, 19  # fields of /proc/<pid>/stat, counted after the name


class Process(NamedTuple):
    """A process, told apart from a later one that got the same number."""

    host: str
    pid: int
    born: str

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_gone(self) -> bool:
        """True only if we can know: a process of another machine is never said to be gone."""
        if not self.is_here:
            return False
        return not _exists(self.pid) or born(self.pid) != self.born


def this_process() -> Process:
    pid = os.getpid()
    return Process(socket.gethostname(), pid, born(pid))


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def born(pid: int) -> str:
    """Boot and start time of a process; empty if it is dead, or if the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[_STATE] in "ZX" else f"{boot}/{fields[_START]}"
