"""Where members find each other: torch's store over TCP, with waits that can be interrupted."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from echelon.comm.place import Place
from echelon.core.errors import PeerError

_PAUSE = 0.0005
_LONGEST_PAUSE = 0.02
_CONNECT = 1.0


class Rendezvous:
    """The store as one member sees it."""

    def __init__(self, place: Place) -> None:
        self.index, self.deadline = place.index, place.deadline
        serves = place.index == 0 and not place.served
        listener = _listen(place) if serves else None
        port = listener.getsockname()[1] if listener else place.port
        self._where = f"{place.host}:{port}"
        try:
            self.address = _own_address(place.host, port, place.deadline)
        except PeerError:
            if listener is not None:
                listener.close()
            raise
        with self._reached():
            self._server = TCPStore(
                place.host,
                port,
                is_master=serves,
                timeout=timedelta(seconds=place.deadline),
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener else None,
            )
        self.store = PrefixStore(place.name, self._server)

    def gather(
        self,
        key: str,
        members: Sequence[int],
        line: str,
        look: Callable[[int], None] | None = None,
    ) -> list[str]:
        """Every member's line, in order. `look(member)` raises if that one cannot come any more."""
        with self._reached():
            self.store.set(f"{key}/{self.index}", line)
        return [self._read(f"{key}/{member}", member, look) for member in members]

    def say(self, key: str) -> None:
        with self._reached():
            self.store.set(key, "")

    def said(self, key: str) -> bool:
        with self._reached():
            return bool(self.store.check([key]))

    def _read(self, key: str, member: int, look: Callable[[int], None] | None) -> str:
        start, pause = time.monotonic(), _PAUSE
        while not self.said(key):
            if look is not None:
                look(member)
            if time.monotonic() - start > self.deadline:
                raise PeerError(
                    f"member {member} did not come to the meeting at {self._where} "
                    f"within {self.deadline:g} s"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        with self._reached():
            return bytes(self.store.get(key)).decode()

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            raise PeerError(f"the meeting at {self._where} cannot be reached: {line}") from None

    def close(self) -> None:
        """The connection, and the server if it is ours, end with the last reference."""
        del self._server, self.store


def _listen(place: Place) -> socket.socket:
    """Reachable from this host alone if that is where everybody is."""
    if place.listener is not None:
        return socket.socket(fileno=place.listener)
    try:
        family, _, _, _, found = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        loopback = ipaddress.ip_address(found[0]).is_loopback
        return socket.create_server((found[0] if loopback else "", place.port), family=family)
    except OSError as error:
        raise PeerError(
            f"no store can be served at {place.host}:{place.port}: {os.strerror(error.errno or 0)}"
        ) from None


def _own_address(host: str, port: int, deadline: float) -> str:
    """This member's address on the way to the store, as soon as the store can be reached.

    Other members that reach the store reach this one there, whatever its host name resolves to.
    """
    start = time.monotonic()
    while True:
        try:
            with socket.create_connection((host, port), timeout=_CONNECT) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() - start > deadline:
                raise PeerError(
                    f"no store at {host}:{port} within {deadline:g} s ({error}): "
                    "member 0 serves it, is it running?"
                ) from None
            time.sleep(_LONGEST_PAUSE)
