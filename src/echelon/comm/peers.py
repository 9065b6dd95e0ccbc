"""Who the members are, and whether they still live."""

from __future__ import annotations

import os
import platform
import select
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.comm.network import is_loopback

_SETTLE = 0.25  # seconds


@dataclass(frozen=True, slots=True)
class Peer:
    """A member as it introduced itself."""

    index: int
    pid: int
    host: str
    """The same for two members if and only if one finds the other's pid and memory."""
    ordered: bool = True
    """Whether its machine shows stores to others in the order they were made."""
    address: str = ""
    """Its own, on the way to the store."""
    store: str = ""
    """The store's, as seen from there."""

    def __str__(self) -> str:
        return f"member {self.index} (pid {self.pid})"

    def line(self) -> str:
        return f"{self.pid} {int(self.ordered)} {self.address} {self.store} {self.host}"

    @classmethod
    def read(cls, index: int, line: str) -> Peer:
        pid, ordered, address, store, host = line.split(" ", 4)
        return cls(index, int(pid), host, ordered == "1", address, store)


def this_host() -> str:
    """Host, boot and pid namespace: two containers of one machine are two hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"


def is_ordered() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def outward(mine: Peer, peers: Iterable[Peer]) -> str:
    """Where members of other hosts reach this one.

    On the store's own host its name may mean loopback, as it does on a fresh Debian; there the
    address is the one by which the others found the store.
    """
    if is_loopback(mine.address):
        for peer in peers:
            if peer.host != mine.host and not is_loopback(peer.store):
                return peer.store
    return mine.address


@dataclass(slots=True)
class Halt:
    """A word from another thread: nobody is to be waited for any more."""

    why: str | None = None


class Watch:
    """Tells when a process of this host has ended, be it reaped or not.

    A pidfd stays with its process, where the number alone may come to mean another one.
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
        """False too for a member of another host, of which nothing is known."""
        if peer.index not in self._handles:
            return False
        handle = self._handles[peer.index]
        if handle is None:
            return True
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(0))

    def settle(self, peers: Sequence[Peer]) -> list[Peer]:
        """Who of these has ended, given a moment: a process that dies closes its sockets first."""
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
