"""Whose updates do harm: each trainer's merit, as it was measured lately, beside the others'.

A push says how far its gradient agrees with that of a few held-out samples (the cosine of the two:
above 0 their loss falls with it, below it rises). One measurement is mostly noise; their moving
mean is not. Random labels have a mean about 0, where others' is far above; so a trainer is turned
away if its mean is a small part of the others' median. It goes on pushing, and takes part again
once its mean is like theirs. Neither is left to chance: what a mean may be off by is known from how
far measurements lie apart. Where the others' is about 0 itself, as at the end of a training,
nothing can be told, and all stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any, Literal

from echelon.core.errors import PeerError

NEW = 0.15
"""How much the last measurement says, beside all before it."""
PATIENCE = 4
"""Measurements before anybody is turned away."""
OUT, IN = 0.25, 0.5
"""Parts of the others' median, below and above which a trainer's place changes."""
LIKELY, CERTAIN = 2.0, 4.0
"""Errors of a mean: by so many the others' are taken to be less before anybody is turned away, and
by so many one that is out has to be better. All are measured hundreds of times: what chance can do,
it does, and one that is let in so does harm until it is out again."""
NOTHING = 0.05
"""A median below this tells nothing."""

Policy = Literal["reject", "weigh"]


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0
    spread: float = 0.0
    """The variance of single measurements."""

    @property
    def error(self) -> float:
        """How far the mean is off, by chance."""
        return math.sqrt(self.spread * NEW / (2 - NEW))

    def add(self, value: float) -> None:
        self.count += 1
        # The mean of all as long as they are few, so that the first one has no say of its own.
        new, moved = max(NEW, 1 / self.count), value - self.value
        self.value += new * moved
        self.spread = (1 - new) * (self.spread + new * moved * moved)


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
            least = self._median(member, members, LIKELY)
            if least is not None and mine.value + mine.error < OUT * least:
                self._out.add(member)
            elif mine.value > IN * theirs and mine.value - CERTAIN * mine.error > OUT * theirs:
                self._out.discard(member)

    def reject(self, member: int) -> str:
        """Count it, and say why."""
        self._rejected[member] = self._rejected.get(member, 0) + 1
        return f"updates of member {member} do harm: their merit is {self._means[member].value:.2f}"

    def state_dict(self) -> dict[str, Any]:
        """For a gate that takes over."""
        means = [[member, *astuple(mean)] for member, mean in self._means.items()]
        return {
            "means": means,
            "out": sorted(self._out),
            "rejected": [list(counted) for counted in self._rejected.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means = {member: _Mean(*mean) for member, *mean in state["means"]}
        self._out = set(state["out"])
        self._rejected = dict(state["rejected"])

    def figures(self) -> dict[int, dict[str, float]]:
        return {
            member: {"merit": mean.value, "rejected": self._rejected.get(member, 0)}
            for member, mean in sorted(self._means.items())
        }

    def _median(self, member: int, members: Collection[int], errors: float = 0.0) -> float | None:
        """Of the others, each less so many errors of its mean; None if it tells nothing."""
        means = [
            self._means[other] for other in members if other in self._means and other != member
        ]
        found = [m.value - errors * m.error for m in means if m.count >= PATIENCE]
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
