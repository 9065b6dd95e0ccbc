"""How fast members are in relation to each other."""

from __future__ import annotations

from echelon.cluster.coordinator.roster import Member, Roster

_EVERY = 0.5  # seconds


class Speeds:
    """Samples per second, 1 being the mean; whose pace is not known yet counts as the mean."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._mean: float | None = None
        self._sum = 1.0
        self._taken = float("-inf")

    def tick(self, now: float) -> None:
        """Looking at everybody for every lease would take longer than the lease."""
        if now - self._taken < _EVERY:
            return
        self._taken = now
        known = [1 / member.pace for member in self._roster if member.pace]
        self._mean = sum(known) / len(known) if known else None
        self._sum = float(max(1, len(self._roster)))

    def of(self, member: Member) -> float:
        if not member.pace or self._mean is None:
            return 1.0
        return 1 / member.pace / self._mean

    def sum_with(self, speed: float) -> float:
        """Of everybody, of which one has this speed."""
        return max(self._sum, speed)
