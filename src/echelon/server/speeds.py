"""How many samples a trainer's next push should have, so that all push at the same pace.

How long a push takes follows its samples, t = c·nᵖ: p is 1 where samples are all there is to do, 0
where every step takes as long whatever it has. c is a trainer's, p the job's, and is learnt from
pushes of different size. Were it taken to be 1, who has few samples would seem slow where it is
not, get fewer yet, and never come back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import exp, log

NEW = 0.25
"""How much the last push says about a pace, beside all before it."""
FIRST = 2
"""Pushes until a pace is believed: the first ones are slow."""
LEAST = 0.1
"""Of an equal part: what a trainer gets however slow it is, so that it can be seen to recover."""
EVEN = 0.1
"""Speeds that are as near to the mean as this are equal: every push of such has a whole batch."""
_FADE = 0.998
"""What a push that was seen still says about p, one push later."""
_DOUBT = 0.1
"""How much has to be seen of different sizes, in squared logarithms, to know better than p = 1."""
_LEAST_POWER = 0.5
"""Below it, fewer samples make a push hardly shorter: nobody is given next to nothing for that."""


@dataclass(slots=True)
class _Pace:
    """Means of the logarithms of samples and seconds."""

    size: float
    time: float


class Speeds:
    """Samples per second, by member."""

    def __init__(self) -> None:
        self._paces: dict[int, _Pace] = {}
        self._seen: dict[int, int] = {}
        self._sizes = self._times = 0.0
        """How much sizes varied, and times with them."""

    def note(self, member: int, samples: int, seconds: float) -> None:
        seen = self._seen[member] = self._seen.get(member, 0) + 1
        if seen <= FIRST or samples <= 0 or seconds <= 0:
            return
        size, time = log(samples), log(seconds)
        if (pace := self._paces.get(member)) is None:
            self._paces[member] = _Pace(size, time)
            return
        size, time = size - pace.size, time - pace.time
        self._sizes = _FADE * self._sizes + size * size
        self._times = _FADE * self._times + size * time
        pace.size += NEW * size
        pace.time += NEW * time

    def forget(self, but: Collection[int]) -> None:
        self._paces = {member: pace for member, pace in self._paces.items() if member in but}
        self._seen = {member: n for member, n in self._seen.items() if member in but}

    def share(self, member: int, members: Collection[int], batch: int) -> float:
        """Of `batch` samples on average; equal parts until all speeds are known."""
        if not members or any(other not in self._paces for other in {member, *members}):
            return float(batch)
        power = self._power()
        mean = sum(self._speed(other, power, batch) for other in members) / len(members)
        relative = self._speed(member, power, batch) / mean
        if abs(relative - 1) <= EVEN:
            return float(batch)
        return max(1.0, round(batch * max(LEAST, relative)))

    def _power(self) -> float:
        found = (self._times + _DOUBT) / (self._sizes + _DOUBT)
        return min(1.0, max(0.0, found))

    def _speed(self, member: int, power: float, batch: int) -> float:
        """How many samples it could have in a second, in relation to others."""
        pace = self._paces[member]
        whole = pace.time + power * (log(batch) - pace.size)
        return exp(-whole / max(power, _LEAST_POWER))
