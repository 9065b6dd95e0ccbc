"""Whoever waits for an update learns who is awaited, where that one is, and since when."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from echelon.cluster.coordinator.outbox import Outbox
from echelon.cluster.coordinator.roster import Member
from echelon.cluster.coordinator.settings import STALL, STALL_STEPS, STALL_UNKNOWN
from echelon.cluster.coordinator.versions import Versions

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
