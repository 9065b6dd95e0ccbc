"""Addresses, and how sockets are set."""

from __future__ import annotations

import contextlib
import socket
import struct

from echelon.comm.network import is_loopback
from echelon.core.errors import PeerError

Address = tuple[str, int] | str
"""Host and port, or the name of an abstract unix socket."""

TICK = 0.25
"""Seconds after which a call that waits looks whether it still should."""
STALL = 30.0
"""Seconds without a byte of progress in mid-frame, though the peer is alive."""
_SLOW = b"bbr"
_FAST = (b"cubic", b"reno")
_LONGEST_NAME = 107


def words(address: Address) -> str:
    return f"unix socket {address}" if isinstance(address, str) else f"{address[0]}:{address[1]}"


def open_socket(address: Address, timeout: float) -> socket.socket:
    """A connection; OSError if nobody takes it at any of the addresses that a name has."""
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


def address_of(listening: socket.socket) -> Address:
    found = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return bytes(found)[1:].decode() if isinstance(found, bytes) else str(found)
    return str(found[0]), int(found[1])


def abstract(name: str) -> str:
    """In no folder: gone with the last socket that has it."""
    if not name or "\0" in name or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name!r} is no name of a unix socket: 1 to {_LONGEST_NAME} bytes")
    return "\0" + name


def stays_here(connected: socket.socket) -> bool:
    """Whether what is sent never leaves this host."""
    if connected.family == socket.AF_UNIX:
        return True
    return is_here(connected.getpeername()[0])


def is_here(host: str) -> bool:
    """Whether an address never leaves this host; also that of an IPv4 peer on an IPv6 socket."""
    return is_loopback(host.removeprefix("::ffff:"))


def congestion(opened: socket.socket) -> None:
    """BBR paces what it sends: over loopback and in data centres that costs more than half."""
    now = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    for name in _FAST if now == _SLOW else ():
        with contextlib.suppress(OSError):  # the kernel does not have it
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def settle(connected: socket.socket) -> None:
    """Calls block, for a tick at most; small frames go at once."""
    connected.settimeout(None)
    tick = struct.pack("@ll", int(TICK), int(TICK % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    if connected.family == socket.AF_UNIX:
        return
    congestion(connected)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Not less: the kernel would count the time in which a busy peer takes nothing, too.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL * 1000))
