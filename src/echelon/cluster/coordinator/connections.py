"""The coordinator's connections: accepted, read, written to and closed without ever blocking.

`Switchboard` handles all connections and passes messages to the server (`Listener`). `Line` is one
of them, with bounded buffers. A connection goes through these stages:

    CHALLENGED ── proof ──▶ PROVEN ── hello ──▶ MEMBER or SUPERVISOR ── last word ──▶ LEAVING
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import deque
from enum import Enum
from itertools import islice
from typing import Any, Protocol

from echelon.cluster.coordinator.membership import Member
from echelon.cluster.coordinator.protocol import (
    LIMIT,
    SHORT,
    BadFrame,
    Decoder,
    Message,
    Seal,
    Tampered,
    challenge_fields,
    encode,
    fresh_nonce,
)
from echelon.comm.channel.sockets import is_here
from echelon.comm.channel.stream import TAG
from echelon.core.format import warn

GREETING = 2.0
"""Seconds from accepting a connection to its hello."""
_GOODBYE = 1.0
"""Seconds to send a last frame and to see the other side close."""
_ACCEPTED = 32
"""Connections accepted in a row, so that existing ones are served in between."""
_REMEMBERED = 1000
"""Messages that are remembered in order to log each only once."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
CHUNK = 1 << 16
UNSENT = 8 * LIMIT
"""Bytes that a member may leave unread before its connection is closed."""
_PARTS = 64
"""Buffers per `sendmsg`."""


class Switchboard:
    """All connections of the coordinator."""

    def __init__(
        self, socket_: socket.socket, selector: selectors.BaseSelector, listener: Listener
    ) -> None:
        socket_.setblocking(False)
        self.lines: set[Line] = set()
        self._passing: set[Line] = set()
        """Connections on their way in or out, which have little time."""
        self._socket, self._selector, self._listener = socket_, selector, listener
        self._accepts = False
        self._said: set[tuple[str, str]] = set()

    def tick(self, now: float) -> None:
        if not self._accepts:
            self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
            self._accepts = True
        for line in list(self._passing):
            if line.stage is Stage.LEAVING:
                if now - line.since > _GOODBYE:
                    self.close(now, line)
            elif now - line.since > GREETING:
                self.refuse(now, line, f"no hello within {GREETING:g} s", again=True)

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTED):
            try:
                connection, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._exhausted(error)
                return
            self._begin(Line(connection, str(address[0]), time.monotonic()))

    def _begin(self, line: Line) -> None:
        self.lines.add(line)
        self._passing.add(line)
        self._selector.register(
            line.socket, selectors.EVENT_READ, lambda seen: self._ready(line, seen)
        )
        self.push(line.since, line)

    def _exhausted(self, error: OSError) -> None:
        """Stop accepting while no descriptors are left; the next tick tries again."""
        if error.errno not in _EXHAUSTED:
            raise error
        self.say_once("this host", f"a connection could not be accepted: {error.strerror}")
        self._selector.unregister(self._socket)
        self._accepts = False

    def settled(self, line: Line) -> None:
        """Note that a connection has said hello: its time limit ends."""
        self._passing.discard(line)

    def _ready(self, line: Line, events: int) -> None:
        now = time.monotonic()
        if events & selectors.EVENT_WRITE and line in self.lines:
            self.push(now, line)
        if events & selectors.EVENT_READ and line in self.lines:
            self._read(now, line)
            self._listener.read_up(now)

    def _read(self, now: float, line: Line) -> None:
        try:
            data = line.receive()
        except OSError:
            data = b""
        if data == b"":
            self.close(now, line)
        elif data is not None and line.stage is not Stage.LEAVING:
            self._decode(now, line, data)

    def _decode(self, now: float, line: Line, data: bytes) -> None:
        try:
            for message in line.decoder.feed(data):
                self._listener.take(now, line, message)
                if line.stage is Stage.LEAVING or line not in self.lines:
                    return
        except Tampered as error:
            self.say_once(line.address, f"a connection was dropped: {error}")
            self.close(now, line)  # its member connects again
        except BadFrame as error:
            self.refuse(now, line, str(error))

    def push(self, now: float, line: Line) -> None:
        """Send what the kernel accepts; the rest when the socket is writable again."""
        try:
            line.flush()
        except OSError:
            self.close(now, line)
            return
        if line.is_clogged:
            self.say_once(line.address, "a connection was dropped: it does not read")
            self.close(now, line)
        elif line.has_unsent != line.watches_writing:
            line.watches_writing = line.has_unsent
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.has_unsent else 0)
            self._selector.modify(line.socket, events, lambda seen: self._ready(line, seen))
        if line.stage is Stage.LEAVING and not line.has_unsent:
            line.say_goodbye()

    def refuse(self, now: float, line: Line, why: str, *, again: bool = False) -> None:
        """End one connection with a reason. `again`: the other side may try again."""
        who = f"member {line.member.id} at {line.address}" if line.member else line.address
        self.say_once(who, f"a connection was refused: {why}")
        self.send_off(now, line, "refused", why=why, again=again)

    def send_off(self, now: float, line: Line, kind: str, **fields: Any) -> None:
        """Send a last frame, and end the connection."""
        self._listener.hung_up(now, line)
        line.put(encode(kind, **fields))
        self.leave(now, line)

    def leave(self, now: float, line: Line) -> None:
        """End the connection once all is sent."""
        line.leave(now)
        self._passing.add(line)
        self.push(now, line)

    def close(self, now: float, line: Line) -> None:
        if line in self.lines:
            self.lines.discard(line)
            self._passing.discard(line)
            self._selector.unregister(line.socket)
            line.close()
            self._listener.hung_up(now, line)

    def close_all(self) -> None:
        for line in self.lines:
            line.close()
        self.lines.clear()

    def say_once(self, who: str, what: str) -> None:
        if (who, what) not in self._said and len(self._said) < _REMEMBERED:
            self._said.add((who, what))
            warn(f"coordinator: {who}: {what}")


class Listener(Protocol):
    """Receives what happens on the connections; implemented by the server."""

    def take(self, now: float, line: Line, message: Message) -> None:
        """Handle a message."""
        ...

    def read_up(self, now: float) -> None:
        """Act on the messages: all that arrived on a connection at once were passed to `take`."""
        ...

    def hung_up(self, now: float, line: Line) -> None:
        """Note that a connection has ended; its member may have a newer one."""
        ...


class Line:
    """One connection: its stage, its member, and the frames that are not sent yet."""

    def __init__(self, connection: socket.socket, address: str, now: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.address, self.since = connection, address, now
        """`since`: when it was accepted, or began to leave."""
        self.stage = Stage.CHALLENGED
        self.member: Member | None = None
        self.watches_writing = False
        self.nonce = fresh_nonce()
        self.sealed = not is_here(address)
        """Whether this connection leaves this host, so that frames have to be encrypted."""
        self._seal: Seal | None = None
        self.decoder = Decoder(SHORT)
        self._unsent: deque[memoryview] = deque()
        self._waiting = 0
        self.put(encode("challenge", **challenge_fields(self.nonce, self.sealed)))

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def is_clogged(self) -> bool:
        return self._waiting > UNSENT

    def proven(self, seal: Seal | None) -> None:
        """Enter the stage PROVEN; all further frames are encrypted with `seal`, if there is one."""
        self.stage, self.decoder.limit = Stage.PROVEN, LIMIT
        if seal is not None:
            self._seal, self.decoder.opened = seal, seal.opened
            self.decoder.limit += TAG

    def put(self, *parts: bytes) -> None:
        """Queue one frame, given in parts."""
        for part in parts if self._seal is None else [self._seal.closed(parts)]:
            self._unsent.append(memoryview(part))
            self._waiting += len(part)

    def receive(self) -> bytes | None:
        """Return the available bytes: empty at the end, None if there are none at present."""
        try:
            return self.socket.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return None

    def flush(self) -> None:
        """Send what the kernel accepts."""
        while self._unsent:
            try:
                if len(self._unsent) == 1:
                    sent = self.socket.send(self._unsent[0])
                else:
                    sent = self.socket.sendmsg(list(islice(self._unsent, _PARTS)))
            except (BlockingIOError, InterruptedError):
                return
            self._waiting -= sent
            self._forget(sent)

    def _forget(self, sent: int) -> None:
        while sent:
            part = self._unsent.popleft()
            if sent < len(part):
                self._unsent.appendleft(part[sent:])
                return
            sent -= len(part)

    def leave(self, now: float) -> None:
        self.stage, self.since, self.member = Stage.LEAVING, now, None

    def say_goodbye(self) -> None:
        """Shut down the sending half. Closing at once could discard what the other side has not
        read yet."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:  # the other side has closed already
            return

    def close(self) -> None:
        self.socket.close()


class Stage(Enum):
    """How far a connection has come. LEAVING: send what is left, and ignore what arrives."""

    CHALLENGED = "challenged"
    PROVEN = "proven"
    MEMBER = "member"
    SUPERVISOR = "supervisor"
    LEAVING = "leaving"
