"""The coordinator's process: one thread and one event loop around the pure `Desk`.

    sockets ──▶ Switchboard ──▶ Server ── checked frames, ticks, ends of processes ──▶ Desk
    sockets ◀── Switchboard ◀── Server ◀──────────── Outbox ◀─────────────────────────┘
                                  └──▶ Post ──▶ journal      written before anything is sent

accept ─▶ challenge ─▶ proof ─▶ hello ─▶ frames …      2 s from accept to hello

`serve` is a coordinator's whole life, from the journal it finds to the last member's leave.
"""

from __future__ import annotations

import gc
import os
import resource
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Protocol

from echelon.cluster.coordinator.connections import Line, Stage, Switchboard
from echelon.cluster.coordinator.coordinator import Desk, Refusal
from echelon.cluster.coordinator.effects import FAREWELL, SYNCED, Outbox, Settings
from echelon.cluster.coordinator.generations import Phase
from echelon.cluster.coordinator.membership import Member, handle_of, look
from echelon.cluster.coordinator.protocol import (
    SUPERVISORS,
    VERSION,
    BadFrame,
    Message,
    answered,
    check,
    encode,
)
from echelon.cluster.coordinator.replay import replay
from echelon.comm.peers import this_host
from echelon.core.errors import TrainingError
from echelon.core.format import warn

_TICK = 0.1
"""Seconds between two ticks."""
_SYNC = 30.0
"""Seconds of entries that a power failure may lose; the kernel's own write-back takes as long."""
_GIVE_UP = 60.0
"""Seconds after which a journal that cannot be written ends the coordinator."""


def serve(
    listener: socket.socket,
    settings: Settings,
    journal: Log,
    past: Iterable[Mapping[str, Any]],
    store: tuple[str, int],
    *,
    attended: bool = True,
) -> bool:
    """Coordinate until SIGTERM, or until the run has ended and all members have left.

    Return whether the run has ended. A coordinator that is not `attended` (SIGUSR1 makes it so)
    ends the run when no member is left, instead of waiting for others to join.

    `past` are the entries of the journal. If the process is killed and `serve` is called again with
    them and the same `listener`, the coordinator continues and its members reconnect. The caller
    closes the listener and the journal.
    """
    now = time.monotonic()
    desk = Desk(settings, store, this_host(), look, now)
    again = replay(desk, past, store, now)
    desk.outbox.note("coordinator", pid=os.getpid(), again=again)
    with (
        _undisturbed(),
        closing(Server(listener, desk, Post(journal, desk.outbox))) as server,
        _signaled(server),
    ):
        server.attended = attended
        server.run()
        over = server.is_over
    journal.sync()
    return over


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Raise the limit of descriptors, and exempt existing objects from garbage collection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _signaled(server: Server) -> Iterator[None]:
    """Handle SIGTERM and SIGUSR1; ignore Ctrl-C, on which the supervisor decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: object) -> None:
        server.stopping = True

    def leave_alone(_number: int, _frame: object) -> None:
        server.attended = False

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, leave_alone)
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Server:
    """Passes frames to the desk, and carries out what the desk puts into its outbox."""

    def __init__(self, listener: socket.socket, desk: Desk, post: Post) -> None:
        self.stopping = False
        self.attended = True
        """False once the supervisor has no members left. Then the run fails as soon as members that
        joined are gone, too."""
        self._desk, self._post = desk, post
        self._selector = selectors.DefaultSelector()
        self._board = Switchboard(listener, self._selector, self)
        self._watch = Watch(self._selector, self._died)
        self._partitions = Partitions()
        self._by_member: dict[int, Line] = {}
        self._ended: float | None = None

    def run(self) -> None:
        """Serve until `stopping` is set, or until the run has ended and all members have left."""
        for member in list(self._desk.roster):
            self._watched(member)
        due = 0.0
        while not self.stopping and not self.is_over:
            if (now := time.monotonic()) >= due:
                due = now + _TICK
                self._tick(now)
            for key, events in self._selector.select(_TICK):
                key.data(events)

    def _tick(self, now: float) -> None:
        if not (self.attended or len(self._desk.roster) or self._desk.may_return(now)):
            self._desk.generations.end("failed", "no member is left")
        self._desk.tick(now)
        self.read_up(now)
        for member in self._partitions.over(now):
            self._reunite(now, member)
        self._board.tick(now)
        self._post.tick(now)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and all members have left, or had the time to."""
        if self._desk.generations.phase is not Phase.ENDED:
            return False
        now = time.monotonic()
        self._ended = self._ended or now
        left = all(line.stage is Stage.SUPERVISOR for line in self._board.lines)
        return now - self._ended > FAREWELL or (self._desk.is_done and left)

    def close(self) -> None:
        self._watch.close()
        self._board.close_all()
        self._selector.close()

    def take(self, now: float, line: Line, message: Message) -> None:
        if line.stage is Stage.MEMBER:
            self._heard(now, line, message)
        elif line.stage is Stage.CHALLENGED:
            key = self._desk.settings.key
            proof, seal = answered(key, line.nonce, line.sealed, message)
            line.put(encode("proof", proof=proof))
            line.proven(seal)
            self._board.push(now, line)
        elif line.stage is Stage.PROVEN:
            self._greeted(now, line, message)
        else:
            self._instructed(now, message)

    def _greeted(self, now: float, line: Line, message: Message) -> None:
        check(message)
        if message["kind"] != "hello" or message["version"] != VERSION:
            raise BadFrame(f"a hello of protocol version {VERSION} was due")
        if message["role"] == "supervisor":
            self._board.settled(line)
            line.stage = Stage.SUPERVISOR
            line.put(encode("welcome", member=None, run=dict(self._desk.settings.run)))
            self._board.push(now, line)
        elif self._partitions.has(message.get("member")):
            self._board.close(now, line)
        else:
            self._let_in(now, line, message)

    def _let_in(self, now: float, line: Line, message: Message) -> None:
        try:
            member = self._desk.hello(now, message)
        except Refusal as refusal:
            self._board.send_off(now, line, refusal.kind, why=refusal.why)
            return
        before = self._by_member.get(member.id)
        self._by_member[member.id] = line
        if before is not None:
            self._board.leave(now, before)
        self._board.settled(line)
        line.stage, line.member = Stage.MEMBER, member
        self._watched(member)

    def _heard(self, now: float, line: Line, message: Message) -> None:
        member = line.member
        assert member is not None
        if self._partitions.has(member.id):
            return
        if self._desk.roster.get(member.id) is not member:
            self._expel(now, line, member.id)
            return
        check(message)
        if message["kind"] in SUPERVISORS:
            raise BadFrame(f"a frame {message['kind']!r} is for supervisors to send")
        self._desk.take(now, member, message)

    def _instructed(self, now: float, message: Message) -> None:
        check(message)
        if message["kind"] == "gone":
            self._desk.gone(now, message["pid"], message["status"])
        elif message["kind"] == "drop":
            self._part(message["member"], now + message["seconds"])
        else:
            raise BadFrame(f"a frame {message['kind']!r} is not for supervisors to send")

    def hung_up(self, now: float, line: Line) -> None:
        member, line.member = line.member, None
        if member is not None and self._by_member.get(member.id) is line:
            del self._by_member[member.id]
            self._desk.disconnected(now, member)

    def read_up(self, now: float) -> None:
        """Carry out the outbox: write, send, close. What cannot be written is not sent either."""
        outbox = self._desk.outbox
        while outbox.notes or outbox.mail or outbox.farewells:
            if not self._post.write(now):
                return
            mail, outbox.mail = outbox.mail, []
            for member, parts in mail:
                self._send(now, member, parts)
            farewells, outbox.farewells = outbox.farewells, []
            for member in farewells:
                self._dismiss(now, member)
        self._post.sync()

    def _send(self, now: float, member: int, parts: tuple[bytes, ...]) -> None:
        line = self._by_member.get(member)
        if line is not None and not self._partitions.has(member):
            line.put(*parts)
            self._board.push(now, line)

    def _dismiss(self, now: float, member: int) -> None:
        self._watch.end(member)
        if not self._partitions.has(member):
            line = self._by_member.pop(member, None)
            if line is not None:
                self._board.leave(now, line)

    def _expel(self, now: float, line: Line, member: int) -> None:
        why = self._desk.roster.gone.get(member, "it was given up")
        self._board.send_off(now, line, "expelled", why=why)

    def _watched(self, member: Member) -> None:
        """Watch a member's process, if it runs on this host."""
        if not member.local:
            return
        handle = handle_of(member.pid)
        if handle is None:
            self._died(member)
        else:
            self._watch.over(member, handle)

    def _died(self, member: Member) -> None:
        now = time.monotonic()
        self._desk.died(now, member)
        self.read_up(now)

    def _part(self, id_: int, until: float) -> None:
        """Cut a member off until `until`. Its process is then treated as one of another host."""
        self._partitions.begin(id_, until)
        member = self._desk.roster.get(id_)
        if member is not None:
            member.local = False

    def _reunite(self, now: float, id_: int) -> None:
        """End a member's partition. Its connection is closed, so that lost frames are repeated."""
        line, member = self._by_member.get(id_), self._desk.roster.get(id_)
        if member is not None:
            member.local = member.host == self._desk.entrance.here
        if line is not None and member is None:
            self._expel(now, line, id_)
        elif line is not None:
            self._board.close(now, line)


class Post:
    """Writes the outbox's notes to the journal, in order. A full disk delays them; none is lost."""

    def __init__(self, journal: Log, outbox: Outbox) -> None:
        self._journal, self._outbox = journal, outbox
        self._failing: float | None = None
        self._unsynced = self._urgent = False
        self._synced = float("-inf")

    def write(self, now: float) -> bool:
        """Write all notes; return whether that succeeded."""
        notes = self._outbox.notes
        while notes:
            kind, fields = notes[0]
            try:
                self._journal.add(kind, **fields)
            except (TrainingError, OSError) as error:
                self._failed(now, error)
                return False
            notes.popleft()
            self._unsynced = True
            self._urgent |= kind in SYNCED
        self._failing = None
        return True

    def sync(self) -> None:
        """Sync the journal to disk if an entry of a `SYNCED` kind was written."""
        if self._urgent:
            self._sync()

    def tick(self, now: float) -> None:
        """Sync the journal now and then."""
        if self._unsynced and now - self._synced >= _SYNC:
            self._synced = now
            self._sync()

    def _sync(self) -> None:
        self._unsynced = self._urgent = False
        try:
            self._journal.sync()
        except (TrainingError, OSError) as error:
            warn(f"coordinator: {error}")

    def _failed(self, now: float, error: Exception) -> None:
        if self._failing is None:
            self._failing = now
            warn(f"coordinator: {error}; nothing is answered until it can be written")
        elif now - self._failing > _GIVE_UP:
            raise error


class Log(Protocol):
    """The part of `echelon.data.journal.Journal` that is used here."""

    def add(self, kind: str, **fields: Any) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Watch:
    """Notices at once when a member's process on this host ends, through its pidfd.

    A pidfd stays with its process even if the pid is used again.
    """

    def __init__(self, selector: selectors.BaseSelector, died: Callable[[Member], None]) -> None:
        self._selector, self._died = selector, died
        self._handles: dict[int, int] = {}

    def over(self, member: Member, handle: int) -> None:
        """Watch a member's process; a second handle for a member replaces the first."""
        self.end(member.id)
        self._handles[member.id] = handle
        self._selector.register(handle, selectors.EVENT_READ, lambda _events: self._ended(member))

    def end(self, member: int) -> None:
        handle = self._handles.pop(member, None)
        if handle is not None:
            self._selector.unregister(handle)
            os.close(handle)

    def close(self) -> None:
        for member in list(self._handles):
            self.end(member)

    def _ended(self, member: Member) -> None:
        self.end(member.id)
        self._died(member)


class Partitions:
    """Members that are cut off to inject a fault: frames from and to them are dropped."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def begin(self, member: int, until: float) -> None:
        self._until[member] = until

    def has(self, member: int | None) -> bool:
        """Return whether a member is cut off. That lasts until `over` has returned it, so that no
        frame gets through before the lost ones are repeated."""
        return member in self._until

    def over(self, now: float) -> list[int]:
        """Return the members whose partition ends now, and forget them."""
        found = [member for member, until in self._until.items() if now >= until]
        for member in found:
            del self._until[member]
        return found
