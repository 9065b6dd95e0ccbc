"""Whose updates do harm: each trainer's merit, as it was measured lately, beside the others'.

A push says how far its gradient agrees with that of a few held-out samples (the cosine of the two:
above 0 their loss falls with it, below it rises). One measurement is mostly noise; their moving
mean is not. A trainer is turned away whose mean says that it does harm *and* is clearly below the
others': where all of them are at or below 0, as at the end of a training, nobody is to blame.
It goes on pushing, and takes part again once its mean says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from echelon.core.errors import PeerError

NEW = 0.2
"""How much the last measurement says, beside all before it."""
PATIENCE = 4
"""Measurements before anybody is turned away."""
MARGIN = 0.05
"""Below the others' median: more than that is no chance."""

Policy = Literal["reject", "weigh"]


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        # The mean of all as long as they are few, so that the first one has no say of its own.
        self.value += (value - self.value) * max(NEW, 1 / self.count)


class Merits:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._means: dict[int, _Mean] = {}
        self._rejected: dict[int, int] = {}

    def note(self, member: int, merit: float) -> None:
        """A measurement; not every push has one."""
        if math.isfinite(merit):
            self._means.setdefault(member, _Mean()).add(max(-1.0, min(1.0, merit)))

    def weight(self, member: int, members: Collection[int]) -> float:
        """What its pushes count for, from 0 (nothing comes of them) to 1."""
        mine, others = self._means.get(member), self._others(member, members)
        if mine is None or mine.count < PATIENCE or not others:
            return 1.0
        theirs = median(others)
        if mine.value < min(0.0, theirs - MARGIN):
            return 0.0
        if self._policy == "reject" or theirs <= MARGIN:
            return 1.0
        return min(1.0, max(MARGIN, mine.value) / theirs)

    def reject(self, member: int) -> str:
        """Count it, and say why."""
        self._rejected[member] = self._rejected.get(member, 0) + 1
        return f"updates of member {member} do harm: their merit is {self._means[member].value:.2f}"

    def figures(self) -> dict[int, dict[str, float]]:
        return {
            member: {"merit": mean.value, "rejected": self._rejected.get(member, 0)}
            for member, mean in sorted(self._means.items())
        }

    def _others(self, member: int, members: Collection[int]) -> list[float]:
        known = (self._means.get(other) for other in members if other != member)
        return [mean.value for mean in known if mean is not None and mean.count >= PATIENCE]


def merits_of(plain: Any) -> Merits | None:
    """By the rules' word for it; None if nobody is judged."""
    match plain:
        case None | "none":
            return None
        case "reject" | "weigh":
            return Merits(plain)
    raise PeerError(f"merit {plain!r} is unknown (choices: none, reject, weigh)")
