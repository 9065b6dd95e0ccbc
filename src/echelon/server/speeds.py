"""How many samples a trainer's next push should have, so that all push at the same pace."""

from __future__ import annotations

from collections.abc import Collection

NEW = 0.25
"""How much the last push says about a speed, beside all before it."""
FIRST = 2
"""Pushes until a speed is believed: the first ones are slow."""
LEAST = 0.1
"""Of an equal part: what a trainer gets however slow it is, so that it can be seen to recover."""


EVEN = 0.1
"""Speeds that are as near to the mean as this are equal: every push of such has a whole batch."""


class Speeds:
    """Samples per second, by member."""

    def __init__(self) -> None:
        self._speeds: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def note(self, member: int, samples: int, seconds: float) -> None:
        seen = self._seen[member] = self._seen.get(member, 0) + 1
        if seen <= FIRST or samples <= 0 or seconds <= 0:
            return
        before = self._speeds.get(member)
        speed = samples / seconds
        self._speeds[member] = speed if before is None else before + NEW * (speed - before)

    def forget(self, but: Collection[int]) -> None:
        self._speeds = {member: v for member, v in self._speeds.items() if member in but}
        self._seen = {member: n for member, n in self._seen.items() if member in but}

    def share(self, member: int, members: Collection[int], batch: int) -> float:
        """Of `batch` samples on average; equal parts until all speeds are known."""
        if not members or any(other not in self._speeds for other in {member, *members}):
            return float(batch)
        mean = sum(self._speeds[other] for other in members) / len(members)
        relative = self._speeds[member] / mean
        if abs(relative - 1) <= EVEN:
            return float(batch)
        return max(1.0, round(batch * max(LEAST, relative)))
