"""Frames to and from one peer, keep-alive."""

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
from echelon.comm.channel.stream import (
    TAG,
    TICK,
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
    close_in_children,
    settle,
)
from echelon.comm.shared_memory import Segment
from echelon.core.errors import PeerError

# --- connection ---
# A peer that has shown the run's key, and frames to and from it.

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


# --- life ---
# Whether the peer still lives, from what the kernel knows of it.
#
# A peer that dies closes its connection: that needs no looking. Three things do.
#
#     its process is stopped    the kernel still answers for it, and its pings stay away. On this
#                               host its state is looked at: one that is busy in a long call is no
#                               dead one. On another host, silence is all there is to go by.
#     its host is gone          nothing that is sent is acknowledged
#     it takes nothing          somebody's send makes no progress; `sockets.STALL` ends that
#
# The times are the kernel's: when something last came in from the peer, whether or not this
# process had a moment to read it. So it does no harm that this process itself is busy, or was
# stopped.

SILENCE = 1.5
"""Seconds without a sign of life until it is asked why."""
STOPPED = 1.25
"""Seconds for which a process may be stopped: that is known, and no guess."""
UNANSWERED = 0.7
"""Seconds for which something sent may go without any answer, beyond what a round trip takes. The
kernel does not always send again that soon: one slow round trip, and it waits three seconds."""
PING_SECONDS = 0.4
"""Seconds without anything sent until a ping is due; looked at every `sockets.TICK`."""
_CLOGGED = 32 * 1024
"""Unread bytes from which on the peer may be unable to send: it is this end that is slow."""

_INFO = struct.Struct("@8B13I")


class Signs(NamedTuple):
    """What the kernel knows of a TCP connection; in seconds."""

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
    """One that has ended is not: its connection will say so."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The command's name comes before, in brackets, and may be anything.
    return text.rpartition(") ")[2][:1] in ("T", "t")


class Life:
    """Of one peer. `pid` is None if its process cannot be looked at from here."""

    def __init__(self, connected: socket.socket, pid: int | None, patience: float) -> None:
        self._socket, self._pid, self._patience = connected, pid, patience
        self._remote = connected.family != socket.AF_UNIX
        self._stopped: float | None = None
        self._asked: float | None = None
        """When something was first seen to be unacknowledged that still is, with nothing heard."""

    def look(self) -> tuple[str | None, bool]:
        """Why it is to be given up, if it is; and whether a ping is due."""
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


# --- pulse ---
# One thread per process that lets all its peers know that it lives, and looks whether they do.


class Patient(Protocol):
    def beat(self) -> None:
        """Called every tick, from another thread."""


class Pulse:
    """Runs as long as there is anybody to look at."""

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
    """This process's own."""
    return _PULSES[0]


def _forked() -> None:
    """The thread is not here, and its lock may be held for ever."""
    _PULSES[0] = Pulse()


os.register_at_fork(after_in_child=_forked)
