"""How members of a group meet, and how they notice that one of them has ended.

`Place` says which member this process is and where the store is. `Rendezvous` is that store:
torch's key-value store over TCP, with waits that can be interrupted. Through it the members
exchange who and where they are (`Peer`). Afterwards `Watch` notices when a process of this host
ends, and `Halt` lets another thread end all waiting.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import platform
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, TCPStore

from echelon.core.errors import PeerError, UserError, unknown

# Seconds.
GRACE = 1.0  # beyond torch's own deadline, because torch's error says more than a TimeoutError
_SETTLE = 0.25  # between a closed connection and the end of the process that closed it
_PAUSE = 0.0005  # between the first looks for a key; the pauses grow
_LONGEST_PAUSE = 0.02
_CONNECT = 1.0  # for one attempt to connect to the store
_SERVED = 5.0  # to wait for a store that another process serves: it starts before the members

# Words in torch's errors when another member is gone; there is no class for these errors.
_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL error")
_SIOCGIFADDR = 0x8915
_LOOPBACK = "lo"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Which member this is, of how many, and where it finds the others."""

    index: int
    count: int
    host: str = "127.0.0.1"
    """Host of the store."""
    port: int = 0
    """Port of the store."""
    listener: int | None = None
    """Descriptor of a socket that already listens there: for member 0 of a local launch."""
    deadline: float = 120.0
    """Seconds a member waits for another before it gives up."""
    served: bool = False
    """Whether another process, such as torchrun's agent, serves the store."""
    name: str = "echelon"
    """Prefix of all keys, different from those of an earlier attempt of the same run."""
    interface: str | None = None
    """Network interfaces, separated by commas, where others reach this member. None: the interface
    that leads to the store."""


class Rendezvous:
    """One member's connection to the store; member 0 also serves it, unless it is `served`.

    `address` is this member's own, on the way to the store, and `seen` is the store's.
    """

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
        """Publish this member's line and wait for those of `members`; return theirs in order.

        `look(member)` is called while that one is awaited: it raises if the member cannot come.
        """
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
        """Return the result of a call to the store, within the deadline.

        Once the store did not answer in time, all later calls fail at once.
        """
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
        """Drop the connection, and the server if this member serves: they end with the object."""
        del self._server, self.store

    def _addresses(self, host: str, port: int) -> tuple[str, str]:
        """Wait until the store can be reached; return this end's address and the store's.

        Other members that reach the store also reach this member at the address, which need not
        hold for the addresses that its host name resolves to.
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
    """Open the socket of the store, on loopback only if `place.host` is a loopback address.

    A host name gives a socket on all interfaces, even if it resolves to loopback on its own host.
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


@dataclass(frozen=True, slots=True)
class Peer:
    """Who and where a member is, as it says itself."""

    index: int
    pid: int
    host: str
    """The same for two members if and only if one finds the other's pid and memory."""
    ordered: bool = True
    """Whether its machine shows stores to others in the order they were made."""
    address: str = ""
    """Its own address, on the way to the store."""
    store: str = ""
    """The store's address, as this member sees it."""

    def __str__(self) -> str:
        return f"member {self.index} (pid {self.pid})"

    def line(self) -> str:
        return f"{self.pid} {int(self.ordered)} {self.address} {self.store} {self.host}"

    @classmethod
    def read(cls, index: int, line: str) -> Peer:
        pid, ordered, address, store, host = line.split(" ", 4)
        return cls(index, int(pid), host, ordered == "1", address, store)


def this_host() -> str:
    """Return host name, boot and pid namespace: two containers of one machine are two hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"


def is_ordered() -> bool:
    """Return whether this machine shows stores in the order they were made: see `comm.board`."""
    return platform.machine() in ("x86_64", "AMD64")


def outward(mine: Peer, peers: Iterable[Peer]) -> str:
    """Return the address where members of other hosts reach this one.

    On the store's own host, the store's name may resolve to loopback, as on a fresh Debian. Members
    there use the address by which the other hosts found the store.
    """
    if is_loopback(mine.address):
        for peer in peers:
            if peer.host != mine.host and not is_loopback(peer.store):
                return peer.store
    return mine.address


@dataclass(slots=True)
class Halt:
    """A request from another thread to end all waiting: `why` is None until it is made."""

    why: str | None = None


class Watch:
    """A watch over processes of this host: it sees that one has ended, reaped or not.

    It uses pidfds because a process id may be given to another process later.
    """

    def __init__(self, peers: Iterable[Peer], halt: Halt | None = None) -> None:
        self.halt = halt or Halt()
        self._handles: dict[int, int | None] = {}
        for peer in peers:
            try:
                self._handles[peer.index] = os.pidfd_open(peer.pid)
            except ProcessLookupError:
                self._handles[peer.index] = None

    def ended(self, peer: Peer) -> bool:
        """Return whether a member has ended; False for members of other hosts."""
        if peer.index not in self._handles:
            return False
        handle = self._handles[peer.index]
        if handle is None:
            return True
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def settle(self, peers: Sequence[Peer]) -> list[Peer]:
        """Return which of these members have ended, after a short wait for the first.

        A process that dies closes its sockets before it counts as ended.
        """
        deadline = time.monotonic() + _SETTLE
        watched = [peer for peer in peers if peer.index in self._handles]
        while watched and time.monotonic() < deadline:
            if ended := [peer for peer in watched if self.ended(peer)]:
                return ended
            time.sleep(_SETTLE / 50)
        return []

    def close(self) -> None:
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            if handle is not None:
                os.close(handle)


def is_torn(error: BaseException) -> bool:
    """Return whether an error of torch means that a connection to another member broke."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


# Network addresses of this host


def is_loopback(address: str) -> bool:
    """Return whether this is an address that never leaves its host. False for a host name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def interface_of(address: str) -> str | None:
    """Return the network interface that has this address, or None if no interface is known to."""
    if is_loopback(address):
        return _LOOPBACK
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        return _of_six(wanted.packed.hex())
    return next((name for _, name in socket.if_nameindex() if _four(name) == address), None)


def _four(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
        except OSError:  # it has none
            return None
    return socket.inet_ntoa(answer[20:24])


def _of_six(digits: str) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:  # a kernel without it
        return None
    return next((line.split()[-1] for line in lines if line.startswith(digits)), None)


# Calls into native code that may never return


def bounded(call: Callable[[], T], seconds: float) -> T:
    """Return or raise what `call` does, or raise TimeoutError after `seconds`.

    torch's store waits for its server without a deadline and ignores signals: a stopped server, or
    a host that lost its power, would hold this process forever. So a thread makes the call, and is
    left behind if the call does not return.
    """
    answers: list[T] = []
    faults: list[BaseException] = []

    def make() -> None:
        try:
            answers.append(call())
        except BaseException as fault:  # raised again below, in the thread that waits
            faults.append(fault)

    aside(make).join(seconds)
    if faults:
        raise faults[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def aside(call: Callable[[], Any]) -> threading.Thread:
    """Begin `call` in a thread that does not keep the process from ending."""
    thread = threading.Thread(target=call, name="echelon-aside", daemon=True)
    thread.start()
    return thread
