"""The coordinator without its sockets: what follows from each thing that is heard or noticed.

Nothing here waits, reads a clock or touches a file; the time is passed in and everything to be
written or sent goes to the outbox.
"""

from __future__ import annotations

import signal

from echelon.cluster.coordinator.entrance import Entrance
from echelon.cluster.coordinator.frames import BadFrame, Message
from echelon.cluster.coordinator.generations import Generations, Phase
from echelon.cluster.coordinator.leases import Leases
from echelon.cluster.coordinator.ledger import LedgerDesk
from echelon.cluster.coordinator.liveness import Liveness, Loss
from echelon.cluster.coordinator.outbox import Outbox
from echelon.cluster.coordinator.processes import Look
from echelon.cluster.coordinator.roster import Member, Roster
from echelon.cluster.coordinator.settings import Settings
from echelon.cluster.coordinator.stalls import Stalls
from echelon.cluster.coordinator.versions import MissingRecords, Versions
from echelon.core.types import Lease

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
        self._ledger = LedgerDesk(self.leases, self.versions, self.roster, self.outbox)
        self._given_up: list[tuple[float, Member]] = []
        """Who was, and when, though it may live."""
        self._ticked = self._acked = now
        self._last_ack = 0
        self._handlers = {
            "beat": self._beat,
            "arrived": self._arrived,
            "commits": self._commits,
            "shares": self._shares,
            "told": self._told,
            "rolled_back": self._rolled_back,
            "leave": self._leave,
            "ledger": self._ledger.open,
            "lease": self._ledger.lease,
            "commit": self._ledger.commit,
            "give_back": self._ledger.give_back,
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

    def _told(self, _now: float, member: Member, message: Message) -> None:
        self.outbox.note("told", member=member.id, text=message["text"])

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
