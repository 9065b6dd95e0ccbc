"""Coordinator, without sockets (sans-IO); stall detection.

The coordinator without its sockets: what follows from each thing that is heard or noticed.

Nothing here waits, reads a clock or touches a file; the time is passed in and everything to be
written or sent goes to the outbox.
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

# --- desk ---

_ASLEEP = 1.0
"""Seconds between two ticks from which on it was the coordinator that did not run."""
_BACK = 30.0
"""Seconds in which one that was given up, and may live, can be expected back."""
_ACKS = 1.0
"""Seconds between two words to everybody about what is on record."""


class Desk:
    """All that a coordinator knows."""

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
        """Who was, and when, though it may live."""
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

    @property
    def is_done(self) -> bool:
        """The run has ended and nobody is left."""
        return self.generations.phase is Phase.ENDED and not len(self.roster)

    def may_return(self, now: float) -> bool:
        """Whether somebody who was given up lives, as far as can be seen, and may yet wake up."""
        recent = (member for since, member in self._given_up if now - since < _BACK)
        here = self.entrance.here
        return any(member.host != here or self._look(member.pid) for member in recent)

    def gave_up(self, now: float, member: Member, how: str) -> None:
        """Remember one that is lost to us, and perhaps not to the world."""
        if how in ("frozen", "silent"):
            kept = [(since, one) for since, one in self._given_up if now - since < _BACK]
            self._given_up = [*kept, (now, member)]

    def hello(self, now: float, message: Message) -> Member:
        """A trainer comes in, or comes back."""
        member = self.entrance.let_in(now, message)
        number = self.generations.number
        run = dict(self.settings.run)
        self.outbox.send(member.id, "welcome", member=member.id, run=run, generation=number)
        self.generations.returned(member, message["generation"])
        return member

    def take(self, now: float, member: Member, message: Message) -> None:
        """Deal with a frame that was checked."""
        kind, seq = message["kind"], message.get("seq")
        handler = self._handlers.get(kind)
        if handler is None:
            raise BadFrame(f"a frame {kind!r} is not for trainers to send at this point")
        if seq is None or seq > member.seq or kind == "lease":
            handler(now, member, message)
        if self.roster.get(member.id) is member:  # or it has just left
            self.roster.heard(member, now)
        if seq is not None:
            member.seq = max(seq, member.seq)
            if kind != "lease":
                self.outbox.send(member.id, "ack", version=self.versions.recorded, seq=seq)

    def disconnected(self, now: float, member: Member) -> None:
        """Its connection is gone; it may come back, unless it cannot."""
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
        """A supervisor's child has ended."""
        member = self.roster.with_pid(pid)
        if member is not None:
            how = "killed" if status < 0 else "error"
            self._lose(now, Loss(member, how, f"its process {ending(status)}"))
        elif self.entrance.never_seen(pid):
            self.generations.never_came(now)

    def tick(self, now: float) -> None:
        """Let everything take effect that is due by now; to be called several times a second."""
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
            # Members keep what they reported until it is on record, be it by another one.
            self._acked, self._last_ack = now, self.versions.recorded
            for member in found:
                self.outbox.send(member.id, "ack", version=self._last_ack, seq=None)

    def _forgive(self, now: float, seconds: float) -> None:
        """It was the coordinator itself that did not run: nobody is to blame for that time."""
        for member in self.roster:
            member.heard = min(now, member.heard + seconds)
            if member.away is not None:
                member.away = min(now, member.away + seconds)

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


def ending(status: int) -> str:
    """How a process ended, as `waitstatus_to_exitcode` gives it."""
    if status >= 0:
        return f"ended with exit code {status}"
    name = f" ({signal.Signals(-status).name})" if -status in set(signal.Signals) else ""
    return f"was killed by signal {-status}{name}"


def _because(loss: Loss) -> str:
    if loss.how == "left":
        return f"left: {loss.why}"
    return f"failed: {loss.why}" if loss.how == "error" else f"is lost: {loss.why}"


# --- entrance ---
# Who is let in: newcomers, and those who come back after their connection broke.


class Refusal(Exception):
    """Somebody cannot be let in: `expelled` or `end`, and why."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


class Entrance:
    """Puts people on the roster."""

    def __init__(self, here: str, roster: Roster, generations: Generations, outbox: Outbox) -> None:
        self.here = here
        """Of which host this is: the processes of no other can be looked at."""
        self._roster, self._generations, self._outbox = roster, generations, outbox
        self._pids: set[int] = set()
        """Of this host's processes that ever said hello."""

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
        """Whether a process of this host ended without a hello; true once for each."""
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


# --- stalls ---
# Whoever waits for an update learns who is awaited, where that one is, and since when.

_SLOW = 1.5
"""Times the usual pace from which on a member is called slow."""
_STALE = 1.0


class Stalls:
    """Speaks up once updates stay out for longer than usual, and again at doubling intervals."""

    def __init__(self, versions: Versions, outbox: Outbox) -> None:
        self._versions, self._outbox = versions, outbox
        self._awaited: Member | None = None
        self._again = 0.0
        """Seconds of waiting after which to speak up again."""

    def tick(self, now: float, members: Sequence[Member], leader: int) -> None:
        """`members` are those of a formed generation."""
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
        """An update came, `waited` seconds after the one before it."""
        if self._awaited is not None and leader is not None:
            member = self._awaited.id
            self._say(leader, member, f"member {member} came after {waited:.1f} s")
        self.reset()

    def lost(self, member: Member) -> None:
        """Whoever is lost will not come."""
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
    """The one that has not moved for longest among those with the lowest step.

    None if nobody stands out: all do the same at the same step, as in an evaluation.
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
