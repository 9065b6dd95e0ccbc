"""The coordinator at work: one thread, one loop, nothing in it that waits for anybody.

accept ─▶ challenge ─▶ proof ─▶ hello ─▶ frames …      2 s to get to the hello
"""

from __future__ import annotations

import selectors
import socket
import time

from echelon.cluster.coordinator.desk import Desk
from echelon.cluster.coordinator.entrance import Refusal
from echelon.cluster.coordinator.frames import BadFrame, Message, encode
from echelon.cluster.coordinator.generations import Phase
from echelon.cluster.coordinator.handshake import VERSION, answered
from echelon.cluster.coordinator.line import Line, Stage
from echelon.cluster.coordinator.messages import SUPERVISORS, check
from echelon.cluster.coordinator.partitions import Partitions
from echelon.cluster.coordinator.post import Post
from echelon.cluster.coordinator.processes import handle_of
from echelon.cluster.coordinator.roster import Member
from echelon.cluster.coordinator.settings import FAREWELL
from echelon.cluster.coordinator.switchboard import Switchboard
from echelon.cluster.coordinator.watch import Watch

_TICK = 0.1


class Server:
    """Brings frames to the desk, and does what the desk wants done."""

    def __init__(self, listener: socket.socket, desk: Desk, post: Post) -> None:
        self.stopping = False
        self.attended = True
        """Whether those who started the run can still add members to it."""
        self._desk, self._post = desk, post
        self._selector = selectors.DefaultSelector()
        self._board = Switchboard(listener, self._selector, self)
        self._watch = Watch(self._selector, self._died)
        self._partitions = Partitions()
        self._by_member: dict[int, Line] = {}
        self._ended: float | None = None

    def run(self) -> None:
        """Until told to stop, or until the run has ended and everybody has left."""
        for member in list(self._desk.roster):
            self._watched(member)
        due = 0.0
        while not self.stopping and not self.is_over:
            if (now := time.monotonic()) >= due:
                due = now + _TICK
                self._tick(now)
            for key, events in self._selector.select(_TICK):
                key.data(events)

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

    def hung_up(self, now: float, line: Line) -> None:
        member, line.member = line.member, None
        if member is not None and self._by_member.get(member.id) is line:
            del self._by_member[member.id]
            self._desk.disconnected(now, member)

    def read_up(self, now: float) -> None:
        """Do what the desk wants written, sent and closed; what cannot be written is not sent."""
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

    @property
    def is_over(self) -> bool:
        """Whether the run has ended and everybody has left, or has had the time to."""
        if self._desk.generations.phase is not Phase.ENDED:
            return False
        now = time.monotonic()
        self._ended = self._ended or now
        left = all(line.stage is Stage.SUPERVISOR for line in self._board.lines)
        return now - self._ended > FAREWELL or (self._desk.is_done and left)

    def _tick(self, now: float) -> None:
        if not (self.attended or len(self._desk.roster) or self._desk.may_return(now)):
            self._desk.generations.end("failed", "no member is left")
        self._desk.tick(now)
        self.read_up(now)
        for member in self._partitions.over(now):
            self._reunite(now, member)
        self._board.tick(now)
        self._post.tick(now)

    def _part(self, id_: int, until: float) -> None:
        """Cut a member off: then its process is as far away as another host's."""
        self._partitions.begin(id_, until)
        member = self._desk.roster.get(id_)
        if member is not None:
            member.local = False

    def _reunite(self, now: float, id_: int) -> None:
        """A member that was cut off: what either said meanwhile has to be said again."""
        line, member = self._by_member.get(id_), self._desk.roster.get(id_)
        if member is not None:
            member.local = member.host == self._desk.entrance.here
        if line is not None and member is None:
            self._expel(now, line, id_)
        elif line is not None:
            self._board.close(now, line)

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

    def _watched(self, member: Member) -> None:
        """Learn of its end from the kernel, if it is one of this host's."""
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
