"""Echelon's own frames without a parameter server: what encryption costs, and small requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from echelon.comm.channel import Connection, Listener, connect
from echelon.core.errors import PeerError

from .wire_work import LOOPBACK, REQUEST, touched

KEY = bytes(range(32))
_LARGEST = 1 << 30
_SMALL, _LARGE = 1, 2
_DEADLINE = 60.0


def serve(ready: Callable[[str], None], seal: bool) -> None:
    listener = Listener((LOOPBACK, 0), KEY, role="server 0", seal=seal)
    ready(str(listener.address[1]))
    connection = None
    while connection is None:
        connection = listener.accept(1.0)
    listener.close()
    with contextlib.suppress(PeerError):  # the caller has ended
        _echo(connection)


def _echo(connection: Connection) -> None:
    memory, small = touched(), touched(REQUEST // 4)
    connection.limit = _LARGEST
    while True:
        frame = connection.receive()
        assert frame is not None
        whole = memory if frame.kind == _LARGE else small
        connection.take([whole])
        connection.send(frame.kind, frame.head, [whole], seq=frame.seq)


class Caller:
    def __init__(self, port: str, seal: bool) -> None:
        self._out, self._in = touched(), touched()
        self._small, self._back = touched(REQUEST // 4), touched(REQUEST // 4)
        self._connection = connect(
            (LOOPBACK, int(port)), KEY, role="trainer 0", deadline=_DEADLINE, seal=seal
        )
        self._connection.limit = _LARGEST

    def exchange(self) -> None:
        """There and back, without an update."""
        self._connection.send(_LARGE, b"", [self._out])
        assert self._connection.receive(_DEADLINE) is not None
        self._connection.take([self._in])

    def ask(self) -> None:
        self._connection.send(_SMALL, b"", [self._small])
        assert self._connection.receive(_DEADLINE) is not None
        self._connection.take([self._back])

    def close(self) -> None:
        self._connection.close()
