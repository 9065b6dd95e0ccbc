"""Speed and merit of trainers; samples applied.

Whose updates do harm: each trainer's merit, as it was measured lately, beside the others'.

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
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass
from math import exp, log
from statistics import median
from typing import Any, Literal, NamedTuple

from echelon.core.errors import PeerError
from echelon.core.types import Lease
from echelon.data.intervals import Intervals

# --- merit ---

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


# --- speeds ---
# How many samples a trainer's next push should have, so that all push at the same pace.
#
# How long a push takes follows its samples, t = c·nᵖ: p is 1 where samples are all there is to do,
# 0 where every step takes as long whatever it has. c is a trainer's, p the job's, and is learnt
# from pushes of different size. Were it taken to be 1, who has few samples would seem slow where
# it is not, get fewer yet, and never come back.

NEW_SPEED = 0.25
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
        pace.size += NEW_SPEED * size
        pace.time += NEW_SPEED * time

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


# --- applied ---
# What is applied: samples by epoch, so that none counts twice, and records of it for others.


class Record(NamedTuple):
    """Samples of an update; those left out, without one, have the member −1 − itself."""

    epoch: int
    start: int
    stop: int
    version: int
    member: int


class _Page:
    __slots__ = ("done", "first", "last")

    def __init__(self, first: int, last: int, done: Intervals) -> None:
        self.first, self.last, self.done = first, last, done


class Applied:
    """The gate's ledger."""

    def __init__(self, samples: int | None, keep: int | None = None) -> None:
        self._samples = samples
        self._keep = keep
        """Versions whose records are kept although nobody asks for them."""
        self._pages: dict[int, _Page] = {}
        self._records: deque[Record] = deque()
        self._left_out: list[Record] = []
        self._last: dict[int, tuple[int, int]] = {}

    def makes_sense(self, lease: Lease) -> bool:
        end = self._samples if self._samples is not None else lease.stop
        return lease.epoch >= 0 and 0 <= lease.start <= lease.stop <= end

    def add(self, member: int, seq: int, lease: Lease, version: int) -> None:
        self._last[member] = seq, version
        if lease.size:
            self._commit(lease, version)
            self._records.append(Record(*lease, version, member))
        if self._keep is not None:
            self.recorded(version - self._keep)

    def leave_out(self, member: int, lease: Lease, version: int) -> None:
        """These samples are done with, without an update; told again they are so already."""
        if lease.size and not self.done(lease):
            self._commit(lease, version)
            self._left_out.append(Record(*lease, version, -1 - member))

    def _commit(self, lease: Lease, version: int) -> None:
        page = self._pages.get(lease.epoch)
        if page is None:
            page = self._pages[lease.epoch] = _Page(version, version, Intervals())
        page.done.add(lease.start, lease.stop)
        page.last = version

    def was(self, member: int, seq: int) -> int | None:
        """The version that this very push made, if it was the member's last."""
        last = self._last.get(member)
        return last[1] if last is not None and last[0] == seq else None

    def done(self, lease: Lease) -> int:
        """How many of these samples are applied."""
        page = self._pages.get(lease.epoch)
        return page.done.overlap(lease.start, lease.stop) if page is not None else 0

    def parts(self, lease: Lease) -> list[tuple[int, int]]:
        """Which of them are."""
        page = self._pages.get(lease.epoch)
        return page.done.common(lease.start, lease.stop) if page is not None else []

    def records(self, after: int) -> list[Record]:
        """What is applied after this version, in its order.

        What was left out at a version follows it, and may be told more than once: it can come when
        the version itself is on record already.
        """
        found = [record for record in self._records if record.version > after]
        left_out = [record for record in self._left_out if record.version >= after]
        return sorted(found + left_out, key=lambda record: (record.version, record.member < 0))

    def recorded(self, version: int) -> None:
        """What came up to this version is on record elsewhere."""
        records = self._records
        while records and records[0].version <= version:
            records.popleft()
        self._left_out = [record for record in self._left_out if record.version >= version]

    def state_dict(self) -> dict[str, Any]:
        """As every ledger is saved, and what it takes to go on in the middle of a run."""
        whole, parts = [], []
        for epoch, page in sorted(self._pages.items()):
            if self._samples is not None and page.done.total == self._samples:
                whole.append([epoch, page.first, page.last])
            else:
                done = [list(pair) for pair in page.done]
                versions = [page.first, page.last]
                parts.append({"epoch": epoch, "versions": versions, "done": done, "twice": []})
        return {"samples": self._samples, "whole": whole, "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        samples = state["samples"]
        self._pages = {
            epoch: _Page(first, last, Intervals([(0, samples)]))
            for epoch, first, last in state["whole"]
        }
        for part in state["parts"]:
            done = Intervals((start, stop) for start, stop in part["done"])
            first, last = part["versions"]
            self._pages[part["epoch"]] = _Page(first, last, done)
        self._records.clear()
        self._left_out.clear()
        self._last.clear()

    def pending(self) -> dict[str, Any]:
        """What is not part of a cut, but of a gate that takes over."""
        return {
            "records": [list(record) for record in self._records],
            "left_out": [list(record) for record in self._left_out],
            "last": [[member, *last] for member, last in self._last.items()],
        }

    def load_pending(self, state: Mapping[str, Any]) -> None:
        self._records = deque(Record(*record) for record in state["records"])
        self._left_out = [Record(*record) for record in state["left_out"]]
        self._last = {member: (seq, version) for member, seq, version in state["last"]}
