"""How long a member may take to leave its generation."""

from __future__ import annotations

from echelon.cluster.coordinator.roster import Member
from echelon.cluster.coordinator.settings import BUSY_LATE, LATE, LATE_STEPS


class Lateness:
    """The longest step of this generation and the one before it decides."""

    def __init__(self) -> None:
        self._longest = self._before = 0.0

    def formed(self) -> None:
        """A generation begins."""
        self._longest, self._before = 0.0, self._longest

    def stepped(self, seconds: float) -> None:
        """A member made a step in this time."""
        self._longest = max(self._longest, seconds)

    def lasts(self, member: Member, now: float) -> None:
        """What a member is at when it is called off is as good as seen."""
        if member.step is not None:
            self.stepped(now - member.moved)

    def is_late(self, member: Member, seconds: float) -> bool:
        """Whether a member should have arrived by now."""
        limit = max(LATE, LATE_STEPS * max(self._longest, self._before))
        return seconds > (max(limit, BUSY_LATE) if member.busy else limit)
