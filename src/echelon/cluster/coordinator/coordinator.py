"""The coordinator without sockets, files or clock: what follows from each event.

Frames and the time come in as arguments; what to journal, send and close goes out through
`Outbox`. The server calls

    hello         a member connects, for the first time or again
    take          a checked frame of a member
    disconnected  a member's connection is gone
    died          a member's process has ended
    gone          a supervisor reports the end of one of its processes
    tick          time has passed: look for silent or late members, and for stalls

and carries out the outbox after each call. `Desk` holds the state in parts: `Roster` and `Liveness`
(who is there), `Generations` (who trains together), `Versions` (what is journaled), `Leases` (who
holds what). `Entrance` decides who is let in, and `Stalls` reports who holds up the others.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Sequence

from echelon.cluster.coordinator.effects import STALL, STALL_STEPS, STALL_UNKNOWN, Outbox, Settings
from echelon.cluster.coordinator.generations import Generations, Phase
from echelon.cluster.coordinator.leases import Leases, LedgerDesk
from echelon.cluster.coordinator.membership import Liveness, Look, Loss, Member, Roster
from echelon.cluster.coordinator.protocol import BadFrame, Message
from echelon.cluster.coordinator.versions import MissingRecords, Versions
from echelon.core.types import Lease

_ASLEEP = 1.0
"""Seconds between two ticks after which the coordinator itself must have been stopped."""
_BACK = 30.0
"""Seconds for which a member that was given up, but may be alive, is expected to come back."""
_ACKS = 1.0
"""Seconds between two announcements of the last journaled version to all members."""
_SLOW = 1.5
"""From this multiple of the others' median seconds per sample on, a member is called slow."""
_STALE = 1.0
"""Seconds without a heartbeat from which on a member stands out among others at the same step."""


class Desk:
    """The whole state of a coordinator, and what it does on each event."""

    def __init__(
        self, settings: Settings, store: tuple[str, int], here: str, look: Look, now: float
    ) -> None:
        self.settings = settings
        self.outbox = Outbox()
        self.roster = Roster(settings.expected)
        self.versions = Versions(self.outbox, settings.samples)
        self.generations = Generations(
            settings, store, self.roster, self.versions, self.outbox, now
        )
        self.entrance = Entrance(here, self.roster, self.generations, self.outbox)
        self.leases = Leases(settings.samples)
        self.liveness = Liveness(self.roster, look)
        self._look = look
        self._stalls = Stalls(self.versions, self.outbox)
        self._ledger = LedgerDesk(self.leases, self.roster, self.outbox)
        self._given_up: list[tuple[float, Member]] = []
        """Members that were given up although they may be alive, with the time."""
        self._ticked = self._acked = now
        self._last_ack = 0
        self._handlers = {
            "beat": self._beat,
            "arrived": self._arrived,
            "commits": self._commits,
            "shares": self._shares,
            "rolled_back": self._rolled_back,
            "leave": self._leave,
            "ledger": self._ledger.open,
            "lease": self._ledger.lease,
        }

    def hello(self, now: float, message: Message) -> Member:
        """Welcome a member that connects for the first time or again; raise `Refusal` if not."""
        member = self.entrance.let_in(now, message)
        number = self.generations.number
        run = dict(self.settings.run)
        self.outbox.send(member.id, "welcome", member=member.id, run=run, generation=number)
        self.generations.returned(member, message["generation"])
        return member

    def take(self, now: float, member: Member, message: Message) -> None:
        """Handle a checked frame. Frames with a `seq` that was handled before are only answered.

        A repeated `lease` is handled again, because its answer is the acknowledgment.
        """
        kind, seq = message["kind"], message.get("seq")
        handler = self._handlers.get(kind)
        if handler is None:
            raise BadFrame(f"a frame {kind!r} is not for trainers to send at this point")
        if seq is None or seq > member.seq or kind == "lease":
            handler(now, member, message)
        if self.roster.get(member.id) is member:  # else the frame made it leave
            self.roster.heard(member, now)
        if seq is not None:
            member.seq = max(seq, member.seq)
            if kind != "lease":
                self.outbox.send(member.id, "ack", version=self.versions.recorded, seq=seq)

    def _beat(self, now: float, member: Member, message: Message) -> None:
        took = self.roster.beat(member, now, message)
        if took:
            self.generations.lateness.stepped(took)

    def _arrived(self, now: float, member: Member, message: Message) -> None:
        self.generations.arrived(now, member, message)
        suspect = (
            self.roster.get(message["suspect"]) if message.get("suspect") is not None else None
        )
        loss = self.liveness.suspected(suspect) if suspect is not None else None
        if loss is not None:
            self._lose(now, loss)

    def _commits(self, now: float, member: Member, message: Message) -> None:
        generation = message["generation"]
        if generation > self.generations.number or not member.generation:
            raise BadFrame(f"{member} reports updates of generation {generation}, it was not in it")
        waited = now - (self.versions.last_commit or now)
        try:
            news = self.versions.commit(now, generation, message["records"], member)
        except MissingRecords as error:
            self.generations.end("failed", str(error))
            return
        for record in message["records"]:
            if len(record) == 6:
                self.leases.applied(Lease(*record[:3]))
        if news:
            self._stalls.updated(waited, self.generations.leader)

    def _shares(self, _now: float, _member: Member, message: Message) -> None:
        if message["generation"] == self.generations.number:
            count = len(self.generations.current.order)
            if len(message["shares"]) != count:
                raise BadFrame(f"{len(message['shares'])} shares for {count} members")
            named = {name: message[name] for name in ("generation", "version", "shares")}
            self.outbox.note("shares", **named)

    def _rolled_back(self, now: float, _member: Member, message: Message) -> None:
        number = self.generations.number
        self.versions.roll_back(now, number, message["version"], message["why"])
        self._stalls.reset()

    def _leave(self, now: float, member: Member, message: Message) -> None:
        why, fatal = message["why"], message["fatal"]
        if message.get("over") and not fatal:
            self.generations.over(why)
        loss = Loss(member, "error" if fatal else "left", why)
        self._remove(now, loss)
        if fatal:
            self.generations.failed(f"{member}: {why}")
        elif not len(self.roster) and not self.generations.is_over:
            self.generations.end("left", why)
        self.generations.lost(now, member, _because(loss))

    def disconnected(self, now: float, member: Member) -> None:
        """Note that a member's connection is gone; if its process lives it may reconnect."""
        if self.roster.get(member.id) is not member:
            return
        if self.generations.phase is Phase.ENDED:
            self.roster.remove(member, self.generations.ending)
        elif member.local and self._look(member.pid) is None:
            self.died(now, member)
        else:
            member.away = now

    def died(self, now: float, member: Member, why: str = "its process has ended") -> None:
        self._lose(now, Loss(member, "killed", why))

    def gone(self, now: float, pid: int, status: int) -> None:
        """Note the end of a supervisor's child, with its exit code or minus the signal."""
        member = self.roster.with_pid(pid)
        if member is not None:
            how = "killed" if status < 0 else "error"
            self._lose(now, Loss(member, how, f"its process {ending(status)}"))
        elif self.entrance.never_seen(pid):
            self.generations.never_came(now)

    def _lose(self, now: float, loss: Loss) -> None:
        member = loss.member
        if self.roster.get(member.id) is not member:
            return
        self.outbox.send(member.id, "expelled", why=loss.why)
        self._remove(now, loss)
        self.generations.lost(now, member, _because(loss))

    def _remove(self, now: float, loss: Loss) -> None:
        member, quiet = loss.member, round(now - loss.member.heard, 3)
        self.roster.remove(member, loss.why)
        self.gave_up(now, member, loss.how)
        self.liveness.forget(member)
        self._stalls.lost(member)
        self.leases.give_back_all(member.id)
        if self.generations.phase is not Phase.ENDED:
            self.outbox.note("lost", member=member.id, how=loss.how, why=loss.why, quiet=quiet)
        self.outbox.hang_up(member.id)

    def gave_up(self, now: float, member: Member, how: str) -> None:
        """Remember a lost member if its process may be alive."""
        if how in ("frozen", "silent"):
            kept = [(since, one) for since, one in self._given_up if now - since < _BACK]
            self._given_up = [*kept, (now, member)]

    def may_return(self, now: float) -> bool:
        """Return whether a member that was given up recently may be alive and come back."""
        recent = (member for since, member in self._given_up if now - since < _BACK)
        here = self.entrance.here
        return any(member.host != here or self._look(member.pid) for member in recent)

    @property
    def is_done(self) -> bool:
        """Whether the run has ended and no member is left."""
        return self.generations.phase is Phase.ENDED and not len(self.roster)

    def tick(self, now: float) -> None:
        """Apply all deadlines that have passed. Call it several times a second."""
        if now - self._ticked > _ASLEEP:
            self._forgive(now, now - self._ticked)
        self._ticked = now
        for loss in self.liveness.losses(now):
            self._lose(now, loss)
        for member in self.generations.tick(now):
            why = f"it did not leave generation {self.generations.number} in time: {member.where}"
            self._lose(now, Loss(member, "silent", why))
        self._ledger.speeds.tick(now)
        if self.generations.phase is Phase.FORMED:
            self._tick_formed(now)

    def _tick_formed(self, now: float) -> None:
        order = self.generations.current.order
        found = [member for member in map(self.roster.get, order) if member is not None]
        self._stalls.tick(now, found, order[0])
        if now - self._acked >= _ACKS and self.versions.recorded != self._last_ack:
            # Members keep their reports until the version is journaled, also from the leader's.
            self._acked, self._last_ack = now, self.versions.recorded
            for member in found:
                self.outbox.send(member.id, "ack", version=self._last_ack, seq=None)

    def _forgive(self, now: float, seconds: float) -> None:
        """Excuse members for time in which the coordinator itself did not run."""
        for member in self.roster:
            member.heard = min(now, member.heard + seconds)
            if member.away is not None:
                member.away = min(now, member.away + seconds)


def ending(status: int) -> str:
    """Return how a process ended, as text; `status` as from `waitstatus_to_exitcode`."""
    if status >= 0:
        return f"ended with exit code {status}"
    name = f" ({signal.Signals(-status).name})" if -status in set(signal.Signals) else ""
    return f"was killed by signal {-status}{name}"


def _because(loss: Loss) -> str:
    if loss.how == "left":
        return f"left: {loss.why}"
    return f"failed: {loss.why}" if loss.how == "error" else f"is lost: {loss.why}"


class Entrance:
    """Lets members in: newcomers, and members that connect again."""

    def __init__(self, here: str, roster: Roster, generations: Generations, outbox: Outbox) -> None:
        self.here = here
        """This host. Only the processes of this host can be looked at."""
        self._roster, self._generations, self._outbox = roster, generations, outbox
        self._pids: set[int] = set()
        """Processes of this host that have said hello, or ended without it."""

    def let_in(self, now: float, message: Message) -> Member:
        known = message.get("member")
        member = self._newcomer(now, message) if known is None else self._known(known, message)
        member.away = None
        self._roster.heard(member, now)
        return member

    def admit(self, now: float, member: Member) -> None:
        member.heard = member.moved = member.since = now
        self._roster.enter(member)
        if member.local:
            self._pids.add(member.pid)

    def never_seen(self, pid: int) -> bool:
        """Return whether a process of this host ended without a hello; true once per process."""
        if pid in self._pids:
            return False
        self._pids.add(pid)
        return True

    def _newcomer(self, now: float, message: Message) -> Member:
        if self._generations.is_over:
            raise Refusal("end", self._generations.ending)
        number = message.get("number")
        id_ = self._roster.new_id(number)
        named = {name: message[name] for name in ("pid", "host", "name")}
        place = number if id_ == number else None
        member = Member(id=id_, **named, number=place, local=message["host"] == self.here)
        self.admit(now, member)
        self._outbox.note("joined", member=id_, **named, number=place)
        return member

    def _known(self, id_: int, message: Message) -> Member:
        member = self._roster.get(id_)
        if member is not None and (member.pid, member.host) == (message["pid"], message["host"]):
            return member
        if self._generations.phase is Phase.ENDED:
            raise Refusal("end", self._generations.ending)
        raise Refusal("expelled", self._roster.gone.get(id_, f"member {id_} is not known here"))


class Refusal(Exception):
    """A member is not let in. `kind` is the frame to answer with: `expelled` or `end`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


class Stalls:
    """Reports who holds up the others, when an update takes longer than usual.

    The report goes to the journal and to the leader, and is repeated at doubling intervals.
    """

    def __init__(self, versions: Versions, outbox: Outbox) -> None:
        self._versions, self._outbox = versions, outbox
        self._awaited: Member | None = None
        self._again = 0.0
        """Seconds of waiting after which to report again."""

    def tick(self, now: float, members: Sequence[Member], leader: int) -> None:
        """Report a stall if one is due; `members` are those of a formed generation."""
        since = self._versions.last_commit
        if since is None or not members:
            return
        waited, limit = now - since, self._limit()
        if waited < max(limit, self._again):
            return
        member = furthest_behind(members, now)
        if member is not None:
            self._awaited = member
            self._say(leader, member.id, _awaiting(member, members, now, waited))
        elif waited < STALL_UNKNOWN:
            return
        else:
            where = f"all {len(members)} members are {members[0].where}"
            self._say(leader, None, f"no update for {waited:.1f} s: {where}")
        self._again = 2 * waited

    def updated(self, waited: float, leader: int | None) -> None:
        """Note an update that came `waited` seconds after the one before it; end a stall."""
        if self._awaited is not None and leader is not None:
            member = self._awaited.id
            self._say(leader, member, f"member {member} came after {waited:.1f} s")
        self.reset()

    def lost(self, member: Member) -> None:
        if self._awaited is member:
            self.reset()

    def reset(self) -> None:
        self._awaited, self._again = None, 0.0

    def _limit(self) -> float:
        usual = self._versions.usual
        return STALL_UNKNOWN if usual is None else max(STALL, STALL_STEPS * usual)

    def _say(self, leader: int, member: int | None, text: str) -> None:
        self._outbox.note("stalled", member=member, text=text)
        self._outbox.send(leader, "notice", text=text)


def furthest_behind(members: Sequence[Member], now: float) -> Member | None:
    """Return the member that has not moved for longest among those with the lowest step.

    Return None if none stands out: all do the same at the same step, as in an evaluation.
    """
    alike = len({(member.step, member.doing) for member in members}) == 1
    if alike and all(now - member.heard < _STALE for member in members):
        return None
    lowest = min(_step(member) for member in members)
    last = [member for member in members if _step(member) == lowest]
    return min(last, key=lambda member: member.heard if alike else member.since)


def _awaiting(member: Member, members: Sequence[Member], now: float, waited: float) -> str:
    quiet = now - member.heard
    return (
        f"waiting for {member}: {member.where}, last sign of life {quiet:.1f} s ago, "
        f"awaited for {waited:.1f} s{_slowness(member, members)}"
    )


def _slowness(member: Member, members: Sequence[Member]) -> str:
    paces = [other.pace for other in members if other.pace and other is not member]
    if not paces or not member.pace:
        return ""
    factor = member.pace / statistics.median(paces)
    return f"; it is {factor:.1f} times slower than the others" if factor >= _SLOW else ""


def _step(member: Member) -> int:
    return -1 if member.step is None else member.step
