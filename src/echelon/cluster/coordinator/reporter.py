"""A supervisor's side: it tells the coordinator which of its children have ended."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

from echelon.cluster.coordinator.call import Call, Refused
from echelon.cluster.coordinator.frames import BadFrame
from echelon.cluster.coordinator.handshake import VERSION
from echelon.core.errors import PeerError

_PAUSE = 0.05


class Reporter:
    """Connects when there is something to say, and again if that fails; has no thread."""

    def __init__(self, address: tuple[str, int], key: bytes, *, deadline: float) -> None:
        self._address, self._key, self._deadline = address, key, deadline
        self._call: Call | None = None

    def gone(self, pid: int, status: int) -> None:
        """A child has ended, with this exit code or minus the signal."""
        self._say("gone", pid=pid, status=status)

    def drop(self, member: int, seconds: float) -> None:
        """Cut a member off from the coordinator for a while, to see what follows."""
        self._say("drop", member=member, seconds=seconds)

    def close(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            with suppress(OSError):
                call.close()

    def _say(self, kind: str, **fields: Any) -> None:
        until = time.monotonic() + self._deadline
        while True:
            try:
                self._connected().send(kind, **fields)
                return
            except (OSError, BadFrame) as error:
                self.close()
                if time.monotonic() > until:
                    raise PeerError(f"the coordinator did not hear of {kind!r}: {error}") from None
                time.sleep(_PAUSE)
            except Refused:
                self.close()
                raise

    def _connected(self) -> Call:
        if self._call is not None and _is_broken(self._call.socket):
            self.close()
        if self._call is None:
            self._call = call = Call(self._address, self._key)
            call.send(
                "hello",
                role="supervisor",
                version=VERSION,
                pid=os.getpid(),
                host="",
                name="supervisor",
                generation=0,
            )
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
