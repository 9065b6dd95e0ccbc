"""Who gives no sign of life any more, and whether that means that it is lost."""

from __future__ import annotations

from typing import NamedTuple

from echelon.cluster.coordinator.processes import Look, Sight
from echelon.cluster.coordinator.roster import Member, Roster
from echelon.cluster.coordinator.settings import PATIENCE, QUIET, QUIET_GAPS, RECONNECT, RETURN

_HALF = QUIET / 2  # seconds between two looks at a process, at least


class Loss(NamedTuple):
    """Somebody is to be given up."""

    member: Member
    how: str
    """killed, frozen, silent, left or error."""
    why: str


class Liveness:
    """Beats tell of the living. For the others of this host, the kernel is asked."""

    def __init__(self, roster: Roster, look: Look) -> None:
        self.restarted: float | None = None
        """When this coordinator took over from another one."""
        self._roster, self._look = roster, look
        self._seen: dict[int, tuple[float, Sight]] = {}

    def losses(self, now: float) -> list[Loss]:
        """Those not heard of for longest come first, so few have to be looked at."""
        found = []
        for member in self._roster:
            if now - member.heard < _HALF:
                break
            loss = self._away(member, now) if member.away is not None else self._mute(member, now)
            if loss is not None:
                found.append(loss)
        return found

    def suspected(self, member: Member) -> Loss | None:
        """Another member blames it: what is certain need not be waited for."""
        sight = self._look(member.pid) if member.local else None
        return self._frozen(member) if sight is not None and sight.stopped else None

    def forget(self, member: Member) -> None:
        self._seen.pop(member.id, None)

    def _away(self, member: Member, now: float) -> Loss | None:
        assert member.away is not None
        if member.local and self._look(member.pid) is None:
            return Loss(member, "killed", "its process has ended")
        limit = RETURN if member.away == self.restarted else RECONNECT
        if now - member.away <= limit:
            return None
        return Loss(member, "silent", f"its connection broke and was not back in {limit:g} s")

    def _mute(self, member: Member, now: float) -> Loss | None:
        quiet, limit = now - member.heard, max(QUIET, QUIET_GAPS * member.gap)
        if not member.local:
            return self._silent(member, limit) if quiet > limit else None
        sight = self._look(member.pid)
        if sight is None:
            return Loss(member, "killed", "its process has ended")
        if sight.stopped:
            return self._frozen(member) if quiet > QUIET else None
        before = self._seen.get(member.id)
        if before is None or before[0] < member.heard:
            self._seen[member.id] = now, sight
        elif quiet > limit and now - before[0] >= _HALF:
            return self._judged(member, now, limit, before[1], sight)
        return None

    def _judged(
        self, member: Member, now: float, limit: float, before: Sight, sight: Sight
    ) -> Loss | None:
        # One that wants to run and is not let is not at fault: the machine is overloaded.
        computes = sight.ticks > before.ticks or sight.state == "R"
        self._seen[member.id] = now, sight
        if computes and now - member.heard <= PATIENCE:
            return None
        return self._silent(member, PATIENCE if computes else limit)

    @staticmethod
    def _frozen(member: Member) -> Loss:
        return Loss(member, "frozen", "its process is stopped")

    @staticmethod
    def _silent(member: Member, limit: float) -> Loss:
        return Loss(member, "silent", f"it gave no sign of life for {limit:.1f} s")
