"""Whose updates do harm: each trainer's merit, as it was measured lately, beside the others'.

A push says how far its gradient agrees with that of a few held-out samples (the cosine of the two:
above 0 their loss falls with it, below it rises). One measurement is mostly noise; their moving
mean is not. Random labels have a mean about 0, where others' is far above; so a trainer is turned
away if its mean is a small part of the others' median. It goes on pushing, and takes part again
once its mean is like theirs. Where theirs is about 0 itself, as at the end of a training, nothing
can be told, and all stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from echelon.core.errors import PeerError

NEW = 0.15
"""How much the last measurement says, beside all before it."""
PATIENCE = 4
"""Measurements before anybody is turned away."""
OUT, IN = 0.25, 0.5
"""Parts of the others' median, below and above which a trainer's place changes."""
NOTHING = 0.05
"""A median below this tells nothing."""

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
        self._out: set[int] = set()
        self._rejected: dict[int, int] = {}

    def note(self, member: int, merit: float, members: Collection[int]) -> None:
        """A measurement, beside those of all members; not every push has one."""
        if math.isfinite(merit):
            self._means.setdefault(member, _Mean()).add(max(-1.0, min(1.0, merit)))
            self._judge(members)

    def weight(self, member: int, members: Collection[int]) -> float:
        """What its pushes count for, from 0 (nothing comes of them) to 1."""
        if member in self._out:
            return 0.0
        mine, theirs = self._means.get(member), self._median(member, members)
        if self._policy == "reject" or mine is None or theirs is None:
            return 1.0
        return min(1.0, max(OUT, mine.value / theirs))

    def _judge(self, members: Collection[int]) -> None:
        """Who is out and who is in, by all that was measured."""
        for member in members:
            mine, theirs = self._means.get(member), self._median(member, members)
            if mine is None or mine.count < PATIENCE or theirs is None:
                continue
            if mine.value < OUT * theirs:
                self._out.add(member)
            elif mine.value > IN * theirs:
                self._out.discard(member)

    def reject(self, member: int) -> str:
        """Count it, and say why."""
        self._rejected[member] = self._rejected.get(member, 0) + 1
        return f"updates of member {member} do harm: their merit is {self._means[member].value:.2f}"

    def state_dict(self) -> dict[str, Any]:
        """For a gate that takes over."""
        means = [[member, mean.value, mean.count] for member, mean in self._means.items()]
        return {
            "means": means,
            "out": sorted(self._out),
            "rejected": [list(counted) for counted in self._rejected.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means = {member: _Mean(value, count) for member, value, count in state["means"]}
        self._out = set(state["out"])
        self._rejected = dict(state["rejected"])

    def figures(self) -> dict[int, dict[str, float]]:
        return {
            member: {"merit": mean.value, "rejected": self._rejected.get(member, 0)}
            for member, mean in sorted(self._means.items())
        }

    def _median(self, member: int, members: Collection[int]) -> float | None:
        """Of the others; None if it tells nothing."""
        means = [self._means[other] for other in members if other in self._means]
        found = [m.value for m in means if m.count >= PATIENCE and m is not self._means.get(member)]
        middle = median(found) if found else 0.0
        return middle if middle > NOTHING else None


def merits_of(plain: Any) -> Merits | None:
    """By the rules' word for it; None if nobody is judged."""
    match plain:
        case None | "none":
            return None
        case "reject" | "weigh":
            return Merits(plain)
    raise PeerError(f"merit {plain!r} is unknown (choices: none, reject, weigh)")
