"""Where members find each other: torch's store over TCP, with waits that can be interrupted."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, TCPStore

from echelon.comm.bounded import bounded
from echelon.comm.network import is_loopback
from echelon.comm.peers import Halt
from echelon.comm.place import Place
from echelon.core.errors import PeerError, UserError, unknown

_PAUSE = 0.0005
_LONGEST_PAUSE = 0.02
_CONNECT = 1.0
_SERVED = 5.0  # seconds: a store that others serve is there before its members are
GRACE = 1.0  # seconds beyond the deadline: what torch itself has to say says more

T = TypeVar("T")


class Rendezvous:
    """The store as one member sees it."""

    def __init__(self, place: Place, halt: Halt | None = None) -> None:
        self.index, self.deadline = place.index, place.deadline
        self._halt = halt or Halt()
        self._patience = min(_SERVED, place.deadline) if place.served else place.deadline
        self.interfaces = _interfaces(place.interface)
        serves = place.index == 0 and not place.served
        listener = _listen(place) if serves else None
        self.port = port = listener.getsockname()[1] if listener else place.port
        self._where = f"{place.host}:{port}"
        self._who = "torchrun's agent" if place.served else "member 0"
        self._silent = False
        try:
            self.address, self.seen = self._addresses(place.host, port)
        except PeerError:
            if listener is not None:
                listener.close()
            raise
        self._server = self.ask(
            lambda: TCPStore(
                place.host,
                port,
                is_master=serves,
                timeout=timedelta(seconds=place.deadline),
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener else None,
            )
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
        self.ask(lambda: self.store.set(f"{key}/{self.index}", line))
        return [self._read(f"{key}/{member}", member, look) for member in members]

    def say(self, key: str) -> None:
        self.ask(lambda: self.store.set(key, ""))

    def said(self, key: str) -> bool:
        return self.ask(lambda: bool(self.store.check([key])))

    def _read(self, key: str, member: int, look: Callable[[int], None] | None) -> str:
        start, pause = time.monotonic(), _PAUSE
        while not self.said(key):
            if self._halt.why is not None:
                raise PeerError(self._halt.why)
            if look is not None:
                look(member)
            if time.monotonic() - start > self.deadline:
                raise PeerError(
                    f"member {member} did not come to the meeting at {self._where} "
                    f"within {self.deadline:g} s"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return self.ask(lambda: bytes(self.store.get(key)).decode())

    def ask(self, call: Callable[[], T]) -> T:
        """What a call that needs the store returns; once the store is silent, all fail at once."""
        try:
            if self._silent:
                raise TimeoutError
            return bounded(call, self.deadline + GRACE)
        except TimeoutError:
            self._silent = True
            raise PeerError(
                f"the meeting at {self._where} did not answer within {self.deadline:g} s: "
                f"{self._who} serves it, is it stopped?"
            ) from None
        except RuntimeError as error:
            line = str(error).partition("\n")[0]
            raise PeerError(f"the meeting at {self._where} cannot be reached: {line}") from None

    def close(self) -> None:
        """The connection, and the server if it is ours, end with the last reference."""
        del self._server, self.store

    def _addresses(self, host: str, port: int) -> tuple[str, str]:
        """This member's on the way to the store, and the store's, as soon as it can be reached.

        Other members that reach the store reach this one there, whatever its host name resolves to.
        """
        start = time.monotonic()
        while True:
            try:
                with socket.create_connection((host, port), timeout=_CONNECT) as connection:
                    return str(connection.getsockname()[0]), str(connection.getpeername()[0])
            except OSError as error:
                if time.monotonic() - start > self._patience:
                    raise PeerError(
                        f"no store at {self._where} within {self._patience:g} s ({error}): "
                        f"{self._who} serves it, is it running?"
                    ) from None
                time.sleep(_LONGEST_PAUSE)


def _interfaces(names: str | None) -> list[str]:
    known = {name for _, name in socket.if_nameindex()}
    asked = names.split(",") if names else []
    for name in asked:
        if name not in known:
            raise UserError(unknown("network interface", name, known))
    return asked


def _listen(place: Place) -> socket.socket:
    """Reachable from this host alone if loopback is what was asked for.

    A host's name is no such wish, even where it means loopback on that host itself.
    """
    if place.listener is not None:
        return socket.socket(fileno=place.listener)
    try:
        family, _, _, _, found = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_STREAM
        )[0]
        here = place.host == "localhost" or is_loopback(place.host)
        return socket.create_server((str(found[0]) if here else "", place.port), family=family)
    except OSError as error:
        known = isinstance(error, socket.gaierror)
        reason = error.strerror if known else os.strerror(error.errno or 0)
        raise PeerError(f"no store can be served at {place.host}:{place.port}: {reason}") from None
