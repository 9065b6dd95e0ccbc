"""Addresses, and how sockets are opened and set.

An `Address` is a host and port, or the name of an abstract unix socket. `open_socket` and
`serve_socket` make sockets, `settle` sets the options of a connection, `stays_here` says whether a
connection leaves this host, and `close_in_children` closes the copies in forked processes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Protocol
from weakref import WeakSet

from echelon.comm.peers import is_loopback
from echelon.core.errors import PeerError

Address = tuple[str, int] | str
"""Host and port, or the name of an abstract unix socket."""


TICK = 0.25
"""Seconds after which a waiting call looks whether it should go on."""
STALL = 30.0
"""Seconds without a byte of progress in the middle of a frame until a live peer is given up."""
_SLOW = b"bbr"
_FAST = (b"cubic", b"reno")
_LONGEST_NAME = 107  # bytes: sun_path has 108, and the first one is zero in an abstract name


def words(address: Address) -> str:
    """Return an address as messages show it."""
    return f"unix socket {address}" if isinstance(address, str) else f"{address[0]}:{address[1]}"


def open_socket(address: Address, timeout: float) -> socket.socket:
    """Connect to an address; OSError if none of the IP addresses of a host accepts."""
    if isinstance(address, str):
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return _connected(opened, abstract(address), timeout)
    error: OSError | None = None
    for family, _, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            congestion(opened)
            return _connected(opened, where, timeout)
        except OSError as this:
            error = this
    assert error is not None, "a name that is known has an address"
    raise error


def _connected(opened: socket.socket, where: object, timeout: float) -> socket.socket:
    try:
        opened.settimeout(timeout)
        opened.connect(where)  # type: ignore[arg-type]
    except BaseException:
        opened.close()
        raise
    return opened


def serve_socket(address: Address) -> socket.socket:
    """Return a socket that listens at an address; PeerError if that is not possible."""
    try:
        return _serve(address)
    except OSError as error:
        raise PeerError(f"nothing can listen at {words(address)}: {error.strerror}") from None


def _serve(address: Address) -> socket.socket:
    if not isinstance(address, str):
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family, backlog=128)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.bind(abstract(address))
        opened.listen(128)
    except BaseException:
        opened.close()
        raise
    return opened


def abstract(name: str) -> str:
    """Return an abstract unix address: in no folder, it ends with the last socket that has it."""
    if not name or "\0" in name or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name!r} is no name of a unix socket: 1 to {_LONGEST_NAME} bytes")
    return "\0" + name


def address_of(listening: socket.socket) -> Address:
    """Return where a socket listens."""
    found = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return bytes(found)[1:].decode() if isinstance(found, bytes) else str(found)
    return str(found[0]), int(found[1])


def stays_here(connected: socket.socket) -> bool:
    """Return whether everything sent over this connection stays on this host."""
    if connected.family == socket.AF_UNIX:
        return True
    return is_here(connected.getpeername()[0])


def is_here(host: str) -> bool:
    """Return whether an address is loopback, be it IPv4, IPv6 or IPv4 mapped into IPv6."""
    return is_loopback(host.removeprefix("::ffff:"))


def settle(connected: socket.socket) -> None:
    """Set up a connection: calls block for one `TICK` at most, and small frames leave at once."""
    connected.settimeout(None)
    tick = struct.pack("@ll", int(TICK), int(TICK % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    if connected.family == socket.AF_UNIX:
        return
    congestion(connected)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Not less than STALL: the kernel also counts the time in which a busy peer reads nothing.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL * 1000))


def congestion(opened: socket.socket) -> None:
    """Replace BBR where it is the default.

    BBR paces what it sends: over loopback and in data centers that costs more than half the speed.
    """
    now = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    for name in _FAST if now == _SLOW else ():
        with contextlib.suppress(OSError):  # the kernel does not have this algorithm
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


# Descriptors belong to one process. A copy of one in a forked child, such as a loader's worker,
# would keep a dead member's connection open, and the other members would wait for it.


def close_in_children(owner: Owner) -> None:
    """Call `owner.close()` in every process that is forked from now on."""
    if not _HOOKED:
        _HOOKED.append(True)
        os.register_at_fork(after_in_child=_forked)
    _OWNERS.add(owner)


class Owner(Protocol):
    def close(self) -> None: ...


_OWNERS: WeakSet[Owner] = WeakSet()
_HOOKED: list[bool] = []


def _forked() -> None:
    for owner in list(_OWNERS):
        owner.close()
    _OWNERS.clear()
