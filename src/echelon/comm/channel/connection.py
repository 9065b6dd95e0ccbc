"""A peer that has shown the run's key, and frames to and from it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

from echelon.comm.channel.buffers import Buffer, view
from echelon.comm.channel.cipher import TAG, Cipher
from echelon.comm.channel.doorway import close_in_children
from echelon.comm.channel.frames import (
    HEADER,
    OWN,
    PING,
    PING_START,
    SEGMENT,
    Frame,
    head_bytes,
    parse,
)
from echelon.comm.channel.handshake import Card, Keys, Refused
from echelon.comm.channel.life import Life
from echelon.comm.channel.memory import Segment
from echelon.comm.channel.plain import Fate, Inbox, NoRoom, Outbox, Progress, Rights
from echelon.comm.channel.pulse import pulse
from echelon.comm.channel.sealed import (
    PlainReceiver,
    PlainSender,
    Receiver,
    SealedReceiver,
    SealedSender,
    Sender,
)
from echelon.comm.channel.sockets import settle
from echelon.core.errors import PeerError

FIRST_LIMIT = 1 << 20
"""Bytes of the largest body, until the connection's user says what it expects."""
_LOWEST_32 = 0xFFFFFFFF


class Terms(NamedTuple):
    """What a handshake came to."""

    card: Card
    where: str
    keys: Keys
    sealed: bool
    pid: int | None
    """The peer's process, if it can be looked at from here."""
    patience: float


def visible(peer: Card, own: Card, connected: socket.socket) -> int | None:
    """The peer's process, if its number means the same here."""
    if peer.host == own.host:
        return peer.pid
    if connected.family == socket.AF_UNIX:
        raise Refused("its processes cannot be seen from here: two containers talk over TCP")
    return None


class Connection:
    """Frames in order. Any thread may send; one at a time receives. Every wait ends with the peer:
    once it is gone, or sends what is no frame, all calls raise the same PeerError."""

    def __init__(self, connected: socket.socket, terms: Terms) -> None:
        self.card = terms.card
        self.peer = f"{terms.card.role} at {terms.where}"
        self.sealed = terms.sealed
        self.limit = FIRST_LIMIT
        """Bytes of the largest body that is let in."""
        settle(connected)
        self._socket, self._owner = connected, os.getpid()
        self._fate = Fate()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._inbox = Inbox(connected, self._fate)
        self._sender, self._receiver = self._ways(terms)
        self._next = terms.keys.receive_start
        self._left = 0
        self._life = Life(connected, terms.pid, terms.patience)
        close_in_children(self)
        pulse().add(self)

    def _ways(self, terms: Terms) -> tuple[Sender, Receiver]:
        outbox, keys = Outbox(self._socket, self._fate), terms.keys
        if not terms.sealed:
            return PlainSender(outbox, keys.send_start), PlainReceiver(self._inbox)
        return (
            SealedSender(outbox, keys.send_start, Cipher(keys.send)),
            SealedReceiver(self._inbox, Cipher(keys.receive)),
        )

    def send(
        self,
        kind: int,
        head: Mapping[str, Any] | bytes = b"",
        body: Sequence[Buffer] = (),
        *,
        seq: int = 0,
    ) -> None:
        """Contiguous CPU tensors, or bytes, go as they are; they must not change until then."""
        self._send(kind, seq, head_bytes(head), [view(part) for part in body])

    def receive(self, timeout: float | None = None) -> Frame | None:
        """The next frame; None if none began in time. What was not taken of the last is skipped."""
        until = None if timeout is None else monotonic() + timeout
        with self._receiving:
            try:
                self._fate.check()
                if self._left:
                    left, self._left = self._left, 0
                    self._receiver.skip(left)
                return self._receive(until)
            except (OSError, EOFError, PeerError) as error:
                raise self._failed(error) from None

    def take(self, into: Sequence[Buffer], progress: Progress | None = None) -> None:
        """The body of the last frame, straight into memory of just its size.

        `progress` is told how many bytes are there, every MiB at least.
        """
        views = [view(part) for part in into]
        size = sum(map(len, views))
        with self._receiving:
            try:
                self._fate.check()
                if size != self._left:
                    raise PeerError(f"sent {self._left:,} bytes where {size:,} were due")
                self._receiver.body(views, progress)
                self._left = 0
            except (OSError, EOFError, PeerError) as error:
                raise self._failed(error) from None
            except BaseException:
                self._fail("was left in the middle of a message")
                raise

    def take_bytes(self) -> bytearray:
        """The body of the last frame in memory of its own: at most `limit` bytes."""
        found = bytearray(self._left)
        self.take([found])
        return found

    def send_segment(self, segment: Segment) -> None:
        """Share memory with a peer of this host, over a unix socket."""
        self._needs_unix()
        size = segment.size.to_bytes(8, "little")
        numbers = segment.descriptor.to_bytes(4, "little")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
        self._send(SEGMENT, 0, size, [], rights)

    def receive_segment(self, size: int, timeout: float = 10.0) -> Segment:
        """The memory that the peer shares next, which has to have this size."""
        self._needs_unix()
        with self._receiving:
            try:
                frame = self._receive(monotonic() + timeout, SEGMENT)
                if frame is None:
                    raise PeerError(f"shared no memory within {timeout:g} s")
                if not self._inbox.descriptors:
                    raise PeerError("shared memory without a descriptor")
                return Segment.from_descriptor(self._inbox.descriptors.popleft(), size)
            except (OSError, EOFError, PeerError) as error:
                raise self._failed(error) from None

    @property
    def pending(self) -> bool:
        """Whether bytes are read ahead: `fileno` says nothing of those."""
        return self._inbox.held > 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Calls of other threads end too. In a forked child, only its copy is closed."""
        pulse().remove(self)
        if self._owner == os.getpid():
            self._fail("was left by this process")
        self._inbox.close()
        self._socket.close()

    def beat(self) -> None:
        """Called every tick by the pulse."""
        try:
            why, ping = self._life.look()
            if why is not None:
                self._fail(why)
                return
            if ping:
                self._ping()
            self._clear()
        except (OSError, ValueError) as error:  # closed, or broken: whoever uses it will see why
            if self._socket.fileno() >= 0:
                self._failed(error)

    def _ping(self) -> None:
        """What is being sent at the moment does as well."""
        if self._sending.acquire(blocking=False):
            try:
                self._sender.ping(PING)
            except NoRoom:
                return
            finally:
                self._sending.release()

    def _send(
        self, kind: int, seq: int, head: bytes, body: list[memoryview], rights: Rights = ()
    ) -> None:
        with self._sending:
            try:
                self._fate.check()
                self._sender.send(kind, seq, head, body, rights)
            except ValueError:  # nothing has been sent yet
                raise
            except (OSError, PeerError) as error:
                raise self._failed(error) from None
            except BaseException:
                self._fail("was left in the middle of a message")
                raise

    def _receive(self, until: float | None, wanted: int | None = None) -> Frame | None:
        while self._inbox.need(HEADER, until):
            if (frame := self._frame(wanted)) is not None:
                return frame
        return None

    def _frame(self, wanted: int | None = None) -> Frame | None:
        """The frame whose header is here; None for a ping."""
        start = bytes(self._inbox.take(HEADER))
        header = parse(memoryview(start), self._next, self.limit)
        self._next = self._next + 1 & _LOWEST_32
        head = self._receiver.head(header, start)
        if header.kind == PING and not header.body:
            return None
        if header.kind != wanted if wanted else header.kind >= OWN:
            raise PeerError(f"sent a frame of kind {header.kind} where another was due")
        self._left = header.body
        return Frame(header.kind, header.seq, head, header.body)

    def _clear(self) -> None:
        """Takes the pings away while nobody receives: in the end they would fill all room. What
        else is there stays where it is, so that who waits for `fileno` is woken up."""
        if not self._receiving.acquire(blocking=False):
            return
        try:
            if not self._left and not self._inbox.held:
                size = HEADER + (TAG if self.sealed else 0)
                for _ in range(self._inbox.admit(PING_START, size)):
                    self._frame()
        except (OSError, EOFError, PeerError) as error:
            self._failed(error)
        finally:
            self._receiving.release()

    def _failed(self, error: BaseException) -> PeerError:
        if isinstance(error, EOFError | ConnectionError):
            return self._fail("closed the connection or ended")
        return self._fail(str(error.strerror if isinstance(error, OSError) else error))

    def _fail(self, why: str) -> PeerError:
        """Ends it for all threads of this end, and for the other end. The first reason counts."""
        if self._fate.why is None:
            self._fate.why = why if why.startswith(self.peer) else f"{self.peer} {why}"
            with contextlib.suppress(OSError):  # it was not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)
        return PeerError(self._fate.why)

    def _needs_unix(self) -> None:
        if self._socket.family != socket.AF_UNIX:
            raise ValueError(f"memory cannot be shared with {self.peer}: not a unix socket")
