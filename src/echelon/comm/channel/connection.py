"""`Connection`: frames to and from one peer that has shown the run's key.

`Life` judges from the kernel's figures whether the peer is alive. `Pulse` is one thread per process
that calls `Connection.beat` on all connections every `TICK`: it sends pings and asks `Life`.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Protocol

from echelon.comm.channel.frames import (
    HEADER,
    OWN,
    PING,
    PING_START,
    SEGMENT,
    Buffer,
    Frame,
    head_bytes,
    parse,
    view,
)
from echelon.comm.channel.handshake import Card, Keys, Refused
from echelon.comm.channel.sockets import TICK, close_in_children, settle
from echelon.comm.channel.stream import (
    LOWEST_32,
    TAG,
    Cipher,
    Fate,
    Inbox,
    NoRoom,
    Outbox,
    PlainReceiver,
    PlainSender,
    Progress,
    Receiver,
    Rights,
    SealedReceiver,
    SealedSender,
    Sender,
)
from echelon.comm.shared_memory import Segment
from echelon.core.errors import PeerError

FIRST_LIMIT = 1 << 20
"""Bytes of the largest body, until the connection's user says what it expects."""
SILENCE = 1.5
"""Seconds without a sign of life until a peer is given up; the default of `patience`."""
STOPPED = 1.25
"""Seconds for which a process may be stopped. Short, because that is known and no guess."""
UNANSWERED = 0.7
"""Seconds for which something sent may stay unacknowledged: more than a round trip takes. The
kernel does not always send again that soon: after one slow round trip it waits three seconds."""
PING_SECONDS = 0.4
"""Seconds without anything sent until a ping is sent; checked every `sockets.TICK`."""
_CLOGGED = 32 * 1024
"""Unread bytes from which on the peer may be unable to send, because this end is slow."""
_INFO = struct.Struct("@8B13I")


class Connection:
    """Frames to and from one peer, in order.

    Any thread may send; one thread at a time receives. Every wait ends when the peer is gone or
    sends something that is no frame: from then on all calls raise the same PeerError.
    """

    def __init__(self, connected: socket.socket, terms: Terms) -> None:
        self.card = terms.card
        self.peer = f"{terms.card.role} at {terms.where}"
        self.sealed = terms.sealed
        self.limit = FIRST_LIMIT
        """Bytes of the largest body that is accepted."""
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
        """Send a frame. The body is contiguous CPU tensors or bytes, which are sent in place.

        The body must not change before this returns.
        """
        self._send(kind, seq, head_bytes(head), [view(part) for part in body])

    def receive(self, timeout: float | None = None) -> Frame | None:
        """Return the next frame, or None if none began in time.

        The body of the previous frame is skipped if it was not taken.
        """
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
        """Receive the body of the last frame straight into memory of exactly its size.

        `progress` is called with the number of bytes that are there, every MiB at least.
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
        """Receive the body of the last frame, at most `limit` bytes, into new memory."""
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
        """Receive memory that the peer shares, which has to have this size."""
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
        """Whether bytes have been read ahead, for which polling `fileno` does not wake up."""
        return self._inbox.held > 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection; calls of other threads end, too.

        A forked child only closes its copy of the socket.
        """
        pulse().remove(self)
        if self._owner == os.getpid():
            self._fail("was left by this process")
        self._inbox.close()
        self._socket.close()

    def beat(self) -> None:
        """Check on the peer and send a ping if one is due. `Pulse` calls this every `TICK`."""
        try:
            why, ping = self._life.look()
            if why is not None:
                self._fail(why)
                return
            if ping:
                self._ping()
            self._clear()
        except (OSError, ValueError) as error:  # closed or broken: the next call raises
            if self._socket.fileno() >= 0:
                self._failed(error)

    def _ping(self) -> None:
        if self._sending.acquire(blocking=False):  # else a frame is on its way, as good as a ping
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
        """Return the frame whose header is here, or None for a ping."""
        start = bytes(self._inbox.take(HEADER))
        header = parse(memoryview(start), self._next, self.limit)
        self._next = self._next + 1 & LOWEST_32
        head = self._receiver.head(header, start)
        if header.kind == PING and not header.body:
            return None
        if header.kind != wanted if wanted else header.kind >= OWN:
            raise PeerError(f"sent a frame of kind {header.kind} where another was due")
        self._left = header.body
        return Frame(header.kind, header.seq, head, header.body)

    def _clear(self) -> None:
        """Read pings while no thread receives: in the end they would fill the socket's buffer.

        All other bytes stay in the socket, so that a thread that polls `fileno` still wakes up.
        """
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
        """End the connection for all threads and for the peer. The first reason counts."""
        if self._fate.why is None:
            self._fate.why = why if why.startswith(self.peer) else f"{self.peer} {why}"
            with contextlib.suppress(OSError):  # already disconnected
                self._socket.shutdown(socket.SHUT_RDWR)
        return PeerError(self._fate.why)

    def _needs_unix(self) -> None:
        if self._socket.family != socket.AF_UNIX:
            raise ValueError(f"memory cannot be shared with {self.peer}: not a unix socket")


class Terms(NamedTuple):
    """The result of a handshake."""

    card: Card
    where: str
    keys: Keys
    sealed: bool
    pid: int | None
    """The peer's process, if it runs on this host."""
    patience: float


def visible(peer: Card, own: Card, connected: socket.socket) -> int | None:
    """Return the peer's process id if it is on this host, where it means the same; else None."""
    if peer.host == own.host:
        return peer.pid
    if connected.family == socket.AF_UNIX:
        raise Refused("its processes cannot be seen from here: two containers talk over TCP")
    return None


class Life:
    """The judgment whether one peer is alive, from the kernel's figures about its connection.

    A peer that dies closes its connection, which needs no check. Three things do:

        its process is stopped    the kernel still answers for it, but its pings stay away. On this
                                  host its state is read: a process that is busy in a long call is
                                  not stopped. On another host, silence is the only sign.
        its host is gone          nothing that is sent is acknowledged
        it reads nothing          a send makes no progress; `sockets.STALL` ends that

    The times are the kernel's: when something last came in from the peer, whether or not this
    process had a moment to read it. So it does no harm if this process itself is busy or was
    stopped.

    `pid` is None if the peer's process is not on this host.
    """

    def __init__(self, connected: socket.socket, pid: int | None, patience: float) -> None:
        self._socket, self._pid, self._patience = connected, pid, patience
        self._remote = connected.family != socket.AF_UNIX
        self._stopped: float | None = None
        self._asked: float | None = None
        """Since when something is unacknowledged and nothing has been heard; None if not so."""

    def look(self) -> tuple[str | None, bool]:
        """Return why to give the peer up, or None; and whether a ping is due."""
        if not self._remote:
            return self._frozen(), False
        seen = signs(self._socket)
        return self._judged(seen), seen.sent >= PING_SECONDS

    def _judged(self, seen: Signs) -> str | None:
        heard = min(seen.received, seen.acknowledged)
        if self._is_unanswered(seen, heard) and heard > SILENCE:
            return f"is out of reach: nothing is acknowledged since {heard:.1f} s"
        if self._pid is not None:
            return self._frozen()
        if seen.received <= self._patience or unread(self._socket) > _CLOGGED:
            return None
        return f"is frozen: its host answers, it says nothing since {seen.received:.1f} s"

    def _is_unanswered(self, seen: Signs, heard: float) -> bool:
        if not seen.unacknowledged:
            self._asked = None
            return False
        now = monotonic()
        if self._asked is None or heard < now - self._asked:
            self._asked = now
        return seen.retransmits > 0 or now - self._asked > UNANSWERED

    def _frozen(self) -> str | None:
        if self._pid is None or not is_stopped(self._pid):
            self._stopped = None
            return None
        now = monotonic()
        self._stopped = self._stopped or now
        if now - self._stopped < STOPPED:
            return None
        return f"is frozen: process {self._pid} is stopped"


class Signs(NamedTuple):
    """The kernel's figures about a TCP connection: packets, and seconds since the last event."""

    retransmits: int
    unacknowledged: int
    sent: float
    received: float
    acknowledged: float


def signs(connected: socket.socket) -> Signs:
    found = _INFO.unpack(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return Signs(found[2], found[12], found[17] / 1e3, found[19] / 1e3, found[20] / 1e3)


def unread(connected: socket.socket) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(connected, termios.FIONREAD, count)
    return count[0]


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped. False if it has ended: its connection will say so."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The state follows the command's name, which is in brackets and may contain anything.
    return text.rpartition(") ")[2][:1] in ("T", "t")


class Patient(Protocol):
    def beat(self) -> None:
        """Called every `TICK`, from the thread of `Pulse`."""


class Pulse:
    """The thread that beats for all connections of this process, while there are any."""

    def __init__(self) -> None:
        self._patients: set[Patient] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, patient: Patient) -> None:
        with self._changed:
            self._patients.add(patient)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="echelon-pulse", daemon=True)
                self._thread.start()

    def remove(self, patient: Patient) -> None:
        with self._changed:
            self._patients.discard(patient)
            if not self._patients:
                self._changed.notify()

    def _run(self) -> None:
        while patients := self._next():
            for patient in patients:
                patient.beat()

    def _next(self) -> list[Patient]:
        with self._changed:
            self._changed.wait_for(lambda: not self._patients, TICK)
            if not self._patients:
                self._thread = None
            return list(self._patients)


_PULSES = [Pulse()]


def pulse() -> Pulse:
    """Return the pulse of this process."""
    return _PULSES[0]


def _forked() -> None:
    # The thread does not exist in the child, and its lock may be held forever.
    _PULSES[0] = Pulse()


os.register_at_fork(after_in_child=_forked)
