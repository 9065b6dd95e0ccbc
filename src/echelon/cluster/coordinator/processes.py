"""What the kernel says of a process of this host."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Sight(NamedTuple):
    """A process at one moment."""

    state: str
    """R: runs or wants to; S, D: waits; T, t: stopped."""
    ticks: int
    """Time on a core so far, all its threads together."""

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


Look = Callable[[int], Sight | None]
"""Process id → what is seen of it; None if it has ended."""


def look(pid: int) -> Sight | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone, or from the moment on in which it goes
        return None
    # The command's name comes before, in brackets, and may be anything.
    fields = text.rpartition(") ")[2].split()
    if fields[0] in "ZXx":
        return None
    return Sight(fields[0], int(fields[11]) + int(fields[12]))


def handle_of(pid: int) -> int | None:
    """A descriptor that becomes readable when this process ends; None if it has."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
