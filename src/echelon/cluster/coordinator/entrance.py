"""Who is let in: newcomers, and those who come back after their connection broke."""

from __future__ import annotations

from echelon.cluster.coordinator.frames import Message
from echelon.cluster.coordinator.generations import Generations, Phase
from echelon.cluster.coordinator.outbox import Outbox
from echelon.cluster.coordinator.roster import Member, Roster


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
