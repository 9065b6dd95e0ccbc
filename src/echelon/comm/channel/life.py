"""Whether the peer still lives, from what the kernel knows of it.

A peer that dies closes its connection: that needs no looking. Three things do.

    its process is stopped    the kernel still answers for it, and its pings stay away. On this
                              host its state is looked at: one that is busy in a long call is no
                              dead one. On another host, silence is all there is to go by.
    its host is gone          nothing that is sent is acknowledged
    it takes nothing          somebody's send makes no progress; `sockets.STALL` ends that

The times are the kernel's: when something last came in from the peer, whether or not this process
had a moment to read it. So it does no harm that this process itself is busy, or was stopped.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import termios
from pathlib import Path
from time import monotonic
from typing import NamedTuple

SILENCE = 1.5
"""Seconds without a sign of life until it is asked why."""
STOPPED = 1.25
"""Seconds for which a process may be stopped: that is known, and no guess."""
UNANSWERED = 0.7
"""Seconds for which something sent may go without any answer, beyond what a round trip takes. The
kernel does not always send again that soon: one slow round trip, and it waits three seconds."""
PING = 0.4
"""Seconds without anything sent until a ping is due; looked at every `sockets.TICK`."""
_CLOGGED = 32 * 1024
"""Unread bytes from which on the peer may be unable to send: it is this end that is slow."""

_INFO = struct.Struct("@8B13I")


class Signs(NamedTuple):
    """What the kernel knows of a TCP connection; in seconds."""

    retransmits: int
    unacknowledged: int
    sent: float
    received: float
    acknowledged: float


def signs(connected: socket.socket) -> Signs:
    found = _INFO.unpack(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return Signs(found[2], found[12], found[17] / 1e3, found[19] / 1e3, found[20] / 1e3)


def unread(connected: socket.socket) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(connected, termios.FIONREAD, count)
    return count[0]


def is_stopped(pid: int) -> bool:
    """One that has ended is not: its connection will say so."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The command's name comes before, in brackets, and may be anything.
    return text.rpartition(") ")[2][:1] in ("T", "t")


class Life:
    """Of one peer. `pid` is None if its process cannot be looked at from here."""

    def __init__(self, connected: socket.socket, pid: int | None, patience: float) -> None:
        self._socket, self._pid, self._patience = connected, pid, patience
        self._remote = connected.family != socket.AF_UNIX
        self._stopped: float | None = None
        self._asked: float | None = None
        """When something was first seen to be unacknowledged that still is, with nothing heard."""

    def look(self) -> tuple[str | None, bool]:
        """Why it is to be given up, if it is; and whether a ping is due."""
        if not self._remote:
            return self._frozen(), False
        seen = signs(self._socket)
        return self._judged(seen), seen.sent >= PING

    def _judged(self, seen: Signs) -> str | None:
        heard = min(seen.received, seen.acknowledged)
        if self._is_unanswered(seen, heard) and heard > SILENCE:
            return f"is out of reach: nothing is acknowledged since {heard:.1f} s"
        if self._pid is not None:
            return self._frozen()
        if seen.received <= self._patience or unread(self._socket) > _CLOGGED:
            return None
        return f"is frozen: its host answers, it says nothing since {seen.received:.1f} s"

    def _is_unanswered(self, seen: Signs, heard: float) -> bool:
        if not seen.unacknowledged:
            self._asked = None
            return False
        now = monotonic()
        if self._asked is None or heard < now - self._asked:
            self._asked = now
        return seen.retransmits > 0 or now - self._asked > UNANSWERED

    def _frozen(self) -> str | None:
        if self._pid is None or not is_stopped(self._pid):
            self._stopped = None
            return None
        now = monotonic()
        self._stopped = self._stopped or now
        if now - self._stopped < STOPPED:
            return None
        return f"is frozen: process {self._pid} is stopped"
