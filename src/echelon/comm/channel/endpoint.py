"""Both ways to a `Connection`: `connect` calls a listener, and `Listener` accepts callers.

Both go through the handshake of `echelon.comm.channel.handshake` first. The caller blocks. The
listener greets many callers at a time without blocking, so that a slow or a strange one holds up no
other.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable

from echelon.comm.channel import handshake
from echelon.comm.channel.connection import SILENCE, Connection, Terms, visible
from echelon.comm.channel.handshake import Card, Refused
from echelon.comm.channel.sockets import (
    TICK,
    Address,
    address_of,
    close_in_children,
    congestion,
    open_socket,
    serve_socket,
    stays_here,
    words,
)
from echelon.comm.peers import this_host
from echelon.core.errors import PeerError

GREETING = 10.0
"""Seconds for a handshake: many, because no one else waits for it and a busy machine is slow."""
CROWD = 64
"""Handshakes at a time; a further one takes the place of the oldest."""
_FULL = 0.05  # seconds to wait when the process has no file descriptor left
_PAUSE = 0.02  # seconds between two attempts to connect
_ATTEMPT = 2.0
"""Seconds for the network to set up a connection."""


def unhalted() -> str | None:
    """Return None: nothing ends the waiting early."""
    return None


def connect(
    address: Address,
    key: bytes,
    *,
    role: str,
    deadline: float,
    patience: float = SILENCE,
    seal: bool | None = None,
    halted: Callable[[], str | None] = unhalted,
) -> Connection:
    """Connect to a listener, trying again for `deadline` seconds unless it refuses.

    `role` is how the listener's messages name this end. `patience` is for how many seconds a peer
    on another host may be silent. `seal` is whether to encrypt; None encrypts what leaves this
    host. `halted` returns a reason to stop waiting, or None.
    """
    wait = _Wait(address, deadline, halted)
    while True:
        try:
            return _attempt(address, key, role, patience, seal, wait)
        except (OSError, EOFError) as error:
            wait.reason = getattr(error, "strerror", None) or str(error)
        wait.look()
        time.sleep(_PAUSE)


def _attempt(
    address: Address, key: bytes, role: str, patience: float, seal: bool | None, wait: _Wait
) -> Connection:
    connected = open_socket(address, _ATTEMPT)
    try:
        connected.settimeout(TICK)
        card = Card(role, os.getpid(), this_host())
        terms = _greet(connected, key, card, seal, wait)._replace(where=words(address))
        return Connection(connected, terms._replace(patience=patience))
    except Refused as error:
        connected.close()
        raise PeerError(f"no connection to {words(address)}: {error}") from None
    except BaseException:
        connected.close()
        raise


def _greet(
    connected: socket.socket, key: bytes, card: Card, seal: bool | None, wait: _Wait
) -> Terms:
    wanted = not stays_here(connected) if seal is None else seal
    nonce = handshake.fresh_nonce()
    heard = _exactly(connected, handshake.CHALLENGE, wait)
    theirs, asked = handshake.read_challenge(heard)
    said = handshake.call(key, nonce, wanted, card, heard)
    connected.sendall(said)
    start = _exactly(connected, handshake.ANSWER, wait)
    reply = start + _exactly(connected, handshake.answer_length(start) - len(start), wait)
    peer = handshake.read_answer(key, reply, heard + said)
    found = handshake.keys(key, theirs, nonce, calling=True)
    pid = visible(peer, card, connected)
    return Terms(peer, "", found, wanted or asked, pid, SILENCE)


def _exactly(connected: socket.socket, count: int, wait: _Wait) -> bytes:
    found = bytearray()
    while len(found) < count:
        try:
            part = connected.recv(count - len(found))
        except TimeoutError:
            wait.look()
            continue
        if not part:
            raise EOFError("it hung up before it said who it is")
        found += part
    return bytes(found)


class _Wait:
    """The end of a caller's patience: `look` raises once the time is up or `halted` says why."""

    def __init__(self, address: Address, deadline: float, halted: Callable[[], str | None]) -> None:
        self._until = time.monotonic() + deadline
        self._where, self._deadline, self._halted = words(address), deadline, halted
        self.reason = "somebody listens there, and does not answer"

    def look(self) -> None:
        if why := self._halted():
            raise PeerError(why)
        if time.monotonic() > self._until:
            raise PeerError(f"nobody at {self._where} within {self._deadline:g} s: {self.reason}")


class Listener:
    """A socket that accepts callers who prove that they know the key.

    `accept` does all the work, so it has to be called again and again. `refused` is called with one
    line about every caller that is turned away.
    """

    def __init__(
        self,
        where: socket.socket | Address,
        key: bytes,
        *,
        role: str,
        patience: float = SILENCE,
        seal: bool | None = None,
        refused: Callable[[str], None] | None = None,
    ) -> None:
        self._socket = where if isinstance(where, socket.socket) else serve_socket(where)
        self.address = address_of(self._socket)
        self._key, self._patience, self._seal = key, patience, seal
        self._card = Card(role, os.getpid(), this_host())
        self._refused = refused
        self._guests: dict[socket.socket, _Guest] = {}
        if self._socket.family != socket.AF_UNIX:
            congestion(self._socket)
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        close_in_children(self)

    def accept(self, timeout: float) -> Connection | None:
        """Return a connection to the next caller that shows the key, or None after `timeout`."""
        until = time.monotonic() + timeout
        while True:
            for event, _ in self._selector.select(self._pause(until)):
                if event.fileobj is self._socket:
                    self._open_door()
                elif (made := self._listen_to(event.fileobj)) is not None:  # type: ignore[arg-type]
                    return made
            self._turn_out_slow()
            if time.monotonic() >= until:
                return None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `accept` has something to do."""
        return self._selector.fileno()

    def close(self) -> None:
        for guest in list(self._guests.values()):
            self._forget(guest)
            guest.socket.close()
        self._selector.close()
        self._socket.close()

    def _pause(self, until: float) -> float:
        for guest in self._guests.values():  # the first one came first and has to be done first
            until = min(until, guest.until)
            break
        return max(0.0, until - time.monotonic())

    def _open_door(self) -> None:
        try:
            connected, address = self._socket.accept()
        except OSError as error:  # the caller is gone again, or no descriptor is left for it
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_FULL)
            return
        connected.setblocking(False)
        guest = _Guest(connected, _name(connected, address))
        if len(self._guests) >= CROWD:
            self._turn_out(next(iter(self._guests.values())), "too many others knock")
        self._guests[connected] = guest
        self._selector.register(connected, selectors.EVENT_READ)
        try:
            guest.greet(self._seal)
        except OSError:
            self._turn_out(guest, "it hung up")

    def _listen_to(self, connected: socket.socket) -> Connection | None:
        guest = self._guests[connected]
        try:
            call = guest.hear()
            return None if call is None else self._let_in(guest, call)
        except Refused as error:
            self._turn_out(guest, str(error))
        except OSError:
            self._turn_out(guest, "it hung up")
        return None

    def _let_in(self, guest: _Guest, call: bytes) -> Connection:
        theirs, wanted, card = handshake.read_call(self._key, call, guest.challenge)
        pid = visible(card, self._card, guest.socket)
        guest.socket.sendall(handshake.answer(self._key, self._card, guest.challenge + call))
        self._forget(guest)
        keys = handshake.keys(self._key, guest.nonce, theirs, calling=False)
        terms = Terms(card, guest.name, keys, guest.seal or wanted, pid, self._patience)
        return Connection(guest.socket, terms)

    def _turn_out_slow(self) -> None:
        now = time.monotonic()
        for guest in [guest for guest in self._guests.values() if guest.until <= now]:
            self._turn_out(guest, f"no handshake within {GREETING:g} s")

    def _turn_out(self, guest: _Guest, why: str) -> None:
        self._forget(guest)
        guest.dismiss(why)
        if self._refused is not None:
            self._refused(f"a connection from {guest.name} was refused: {why}")

    def _forget(self, guest: _Guest) -> None:
        if self._guests.pop(guest.socket, None) is not None:
            self._selector.unregister(guest.socket)


class _Guest:
    """A caller that has not shown the key yet."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        self.socket, self.name = connected, name
        self.seal = True
        self.nonce, self.challenge = handshake.fresh_nonce(), b""
        self.until = time.monotonic() + GREETING
        self._heard = b""
        self._length = handshake.CALL

    def greet(self, seal: bool | None) -> None:
        self.seal = not stays_here(self.socket) if seal is None else seal
        self.challenge = handshake.challenge(self.nonce, self.seal)
        self.socket.sendall(self.challenge)  # a few bytes, which the kernel always takes

    def hear(self) -> bytes | None:
        """Return the caller's whole proof once it is here, else None. Reads not a byte more."""
        part = self.socket.recv(self._length - len(self._heard))
        if not part:
            raise Refused("it hung up")
        self._heard += part
        if len(self._heard) == self._length == handshake.CALL:
            self._length = handshake.call_length(self._heard)
        return self._heard if len(self._heard) == self._length else None

    def dismiss(self, why: str) -> None:
        try:
            self.socket.send(handshake.refusal(why))
        except OSError:  # the caller has gone
            return
        finally:
            self.socket.close()


def _name(connected: socket.socket, address: object) -> str:
    if connected.family == socket.AF_UNIX:
        return "a unix socket"
    assert isinstance(address, tuple)
    return words((address[0], address[1]))
