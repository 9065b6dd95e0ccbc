"""A supervisor's side: it tells the coordinator which of its children have ended."""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import suppress
from typing import Any

from echelon.cluster.coordinator.call import Call
from echelon.cluster.coordinator.frames import BadFrame
from echelon.cluster.coordinator.handshake import VERSION


class Reporter:
    """Has no thread, and never waits for longer than `patience` seconds.

    What could not be told, because the coordinator is dead or just starting, is told when there is
    something else to tell or when `flush` is called.
    """

    def __init__(self, address: tuple[str, int], key: bytes, *, patience: float = 0.5) -> None:
        self._address, self._key, self._patience = address, key, patience
        self._untold: deque[dict[str, Any]] = deque()
        self._call: Call | None = None

    def gone(self, pid: int, status: int) -> bool:
        """A child has ended, with this exit code or minus the signal; says whether all is told."""
        self._untold.append({"kind": "gone", "pid": pid, "status": status})
        return self.flush()

    def drop(self, member: int, seconds: float) -> bool:
        """Cut a member off from the coordinator for a while, to see what follows."""
        self._untold.append({"kind": "drop", "member": member, "seconds": seconds})
        return self.flush()

    def flush(self) -> bool:
        """Tell what is left to tell; says whether that is all."""
        try:
            while self._untold:
                self._connected().send(**self._untold[0])
                self._untold.popleft()
        except (OSError, BadFrame):
            self.close()
            return False
        return True

    def close(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            with suppress(OSError):
                call.close()

    def _connected(self) -> Call:
        if self._call is not None and _is_broken(self._call.socket):
            self.close()
        if self._call is None:
            call = self._call = Call(self._address, self._key, self._patience)
            who = {"role": "supervisor", "pid": os.getpid(), "host": "", "name": "supervisor"}
            call.send("hello", version=VERSION, generation=0, **who)
            call.next("welcome")
        return self._call


def _is_broken(connection: socket.socket) -> bool:
    """A coordinator that was killed is known by the end of what it says."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
