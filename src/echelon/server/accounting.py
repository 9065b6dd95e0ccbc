"""The gate's books: which samples are applied, and the speed and merit of each trainer.

`Applied` is the gate's ledger: no sample may count twice. `Speeds` says how many samples the next
push of a trainer should have. `Merits` turns away trainers whose updates do harm.
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

# Samples that are applied


class Record(NamedTuple):
    """Samples [start, stop) of an epoch, and the update they are part of.

    Samples that were left out, without an update, have −1 − member for their member.
    """

    epoch: int
    start: int
    stop: int
    version: int
    member: int


class Applied:
    """The gate's ledger: applied samples by epoch, and records of them for the run's journal.

    `samples`: of an epoch, if known; `keep`: versions whose records are kept if none asks for them,
    without limit if not given.
    """

    def __init__(self, samples: int | None, keep: int | None = None) -> None:
        self._samples = samples
        self._keep = keep
        self._pages: dict[int, _Page] = {}
        """One page for each epoch."""
        self._records: deque[Record] = deque()
        self._left_out: list[Record] = []
        self._last: dict[int, tuple[int, int]] = {}
        """Per member, number and version of its last push that was applied."""

    def makes_sense(self, lease: Lease) -> bool:
        """Return whether there can be such samples."""
        end = self._samples if self._samples is not None else lease.stop
        return lease.epoch >= 0 and 0 <= lease.start <= lease.stop <= end

    def add(self, member: int, seq: int, lease: Lease, version: int) -> None:
        """Count a push's samples as applied in `version`."""
        self._last[member] = seq, version
        if lease.size:
            self._commit(lease, version)
            self._records.append(Record(*lease, version, member))
        if self._keep is not None:
            self.recorded(version - self._keep)

    def leave_out(self, member: int, lease: Lease, version: int) -> None:
        """Count samples as done without an update. A repeated call changes nothing."""
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
        """Return the version that this push made, if it is the member's last one; else None."""
        last = self._last.get(member)
        return last[1] if last is not None and last[0] == seq else None

    def done(self, lease: Lease) -> int:
        """Return how many of these samples are applied."""
        page = self._pages.get(lease.epoch)
        return page.done.overlap(lease.start, lease.stop) if page is not None else 0

    def parts(self, lease: Lease) -> list[tuple[int, int]]:
        """Return which of these samples are applied, as [start, stop) pairs."""
        page = self._pages.get(lease.epoch)
        return page.done.common(lease.start, lease.stop) if page is not None else []

    def records(self, after: int) -> list[Record]:
        """Return records of later versions, in order.

        Samples that were left out at a version follow that version. They may be returned again
        after it is on record, because they can come later than the version itself.
        """
        found = [record for record in self._records if record.version > after]
        left_out = [record for record in self._left_out if record.version >= after]
        return sorted(found + left_out, key=lambda record: (record.version, record.member < 0))

    def recorded(self, version: int) -> None:
        """Drop records up to this version: they are in the run's journal."""
        records = self._records
        while records and records[0].version <= version:
            records.popleft()
        self._left_out = [record for record in self._left_out if record.version >= version]

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger in the form of `data.ledger`, for a checkpoint."""
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
        """Return what a gate that takes over needs besides `state_dict`."""
        return {
            "records": [list(record) for record in self._records],
            "left_out": [list(record) for record in self._left_out],
            "last": [[member, *last] for member, last in self._last.items()],
        }

    def load_pending(self, state: Mapping[str, Any]) -> None:
        self._records = deque(Record(*record) for record in state["records"])
        self._left_out = [Record(*record) for record in state["left_out"]]
        self._last = {member: (seq, version) for member, seq, version in state["last"]}


class _Page:
    """Applied samples of one epoch, and the first and last version that applied some."""

    __slots__ = ("done", "first", "last")

    def __init__(self, first: int, last: int, done: Intervals) -> None:
        self.first, self.last, self.done = first, last, done


# Speed

SPEED_SMOOTHING = 0.25
"""Weight of the last push in a trainer's pace, beside all pushes before it."""
FIRST = 2
"""Pushes of each trainer that are not measured: the first ones are slow."""
LEAST = 0.1
"""The smallest part of a batch that a slow trainer gets, so that its recovery can be seen."""
EVEN = 0.1
"""A trainer whose speed is this near to the mean gets a whole batch for each push."""
_FADE = 0.998
"""Decay per push of what was learnt about p."""
_DOUBT = 0.1
"""How much sizes must have varied, in squared logarithms, before p moves far from 1."""
_LEAST_POWER = 0.5
"""The smallest p that shares are computed with: below, fewer samples hardly make a push shorter,
and a slow trainer would get next to nothing."""


class Speeds:
    """How many samples a trainer's next push should have, so that all push at the same pace.

    The time of a push follows its samples, t = c·nᵖ: p is 1 if samples are all there is to do, and
    0 if every step takes the same time. Each trainer has its own c; p belongs to the job, and is
    learnt from pushes of different sizes. If p were taken to be 1, a trainer with few samples would
    seem slower than it is, get fewer yet, and never come back.
    """

    def __init__(self) -> None:
        self._paces: dict[int, _Pace] = {}
        self._seen: dict[int, int] = {}
        self._sizes = self._times = 0.0
        """How much sizes varied (Σ of squared logarithms), and times with them."""

    def note(self, member: int, samples: int, seconds: float) -> None:
        """Note how long a push of so many samples took."""
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
        pace.size += SPEED_SMOOTHING * size
        pace.time += SPEED_SMOOTHING * time

    def forget(self, but: Collection[int]) -> None:
        self._paces = {member: pace for member, pace in self._paces.items() if member in but}
        self._seen = {member: n for member, n in self._seen.items() if member in but}

    def share(self, member: int, members: Collection[int], batch: int) -> float:
        """Return the samples of the member's next push: `batch` on average over all members.

        All get `batch` until the speeds of all are known.
        """
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
        """Return a member's speed for batches of this size, up to a common factor."""
        pace = self._paces[member]
        whole = pace.time + power * (log(batch) - pace.size)
        return exp(-whole / max(power, _LEAST_POWER))


@dataclass(slots=True)
class _Pace:
    """Moving means of the logarithms of a trainer's samples and seconds."""

    size: float
    time: float


# Merit

MERIT_SMOOTHING = 0.15
"""Weight of the last measurement in a trainer's mean, beside all before it."""
PATIENCE = 4
"""Measurements of a trainer before its mean counts."""
OUT, IN = 0.25, 0.5
"""Parts of the others' median: a trainer below the first is turned away, and let in again above the
second."""
LIKELY, CERTAIN = 2.0, 4.0
"""Errors of a mean. Before a trainer is turned away, the others' means are lowered by the first
number of errors; before it is let in, its own is lowered by the second. Each trainer is measured
hundreds of times, so rare chances do happen, and one that is let in by chance does harm until it is
out again."""
NOTHING = 0.05
"""A median below this is too small to judge by."""
Policy = Literal["reject", "weigh"]


def merits_of(plain: Any) -> Merits | None:
    """Return the merits for a policy of the rules, or None if trainers are not judged."""
    match plain:
        case None | "none":
            return None
        case "reject" | "weigh":
            return Merits(plain)
    raise PeerError(f"merit {plain!r} is unknown (choices: none, reject, weigh)")


class Merits:
    """Judges trainers by how far their gradients agree with those of held-out samples.

    A push says how far its gradient agrees with that of a few held-out samples (the cosine of the
    two: above 0 their loss falls with it, below it rises). One measurement is mostly noise; their
    moving mean is not. A trainer with random labels has a mean about 0, far below the others', so a
    trainer is turned away if its mean is a small part of the others' median. It goes on pushing,
    and takes part again once its mean is like theirs. The error of each mean is known from the
    spread of its measurements, and neither change is left to chance. Where the others' median is
    about 0 itself, as at the end of a training, it says nothing, and all stays as it is.

    `policy`: "reject" turns trainers away; "weigh" does so, too, and gives the others a weight by
    their merit.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._means: dict[int, _Mean] = {}
        self._out: set[int] = set()
        self._rejected: dict[int, int] = {}

    def note(self, member: int, merit: float, members: Collection[int]) -> None:
        """Note the merit of a push, and judge all members again. NaN: it was not measured."""
        if math.isfinite(merit):
            self._means.setdefault(member, _Mean()).add(max(-1.0, min(1.0, merit)))
            self._judge(members)

    def weight(self, member: int, members: Collection[int]) -> float:
        """Return what a member's pushes count for, from 0 (turned away) to 1."""
        if member in self._out:
            return 0.0
        mine, theirs = self._means.get(member), self._median(member, members)
        if self._policy == "reject" or mine is None or theirs is None:
            return 1.0
        return min(1.0, max(OUT, mine.value / theirs))

    def reject(self, member: int) -> str:
        """Count a push that is turned away, and return the reason."""
        self._rejected[member] = self._rejected.get(member, 0) + 1
        return f"updates of member {member} do harm: their merit is {self._means[member].value:.2f}"

    def _judge(self, members: Collection[int]) -> None:
        """Decide which members are turned away."""
        for member in members:
            mine, theirs = self._means.get(member), self._median(member, members)
            if mine is None or mine.count < PATIENCE or theirs is None:
                continue
            least = self._median(member, members, LIKELY)
            if least is not None and mine.value + mine.error < OUT * least:
                self._out.add(member)
            elif mine.value > IN * theirs and mine.value - CERTAIN * mine.error > OUT * theirs:
                self._out.discard(member)

    def _median(self, member: int, members: Collection[int], errors: float = 0.0) -> float | None:
        """Return the median of the others' means, each lowered by so many of its errors.

        None if it is too small to judge by.
        """
        means = [
            self._means[other] for other in members if other in self._means and other != member
        ]
        found = [m.value - errors * m.error for m in means if m.count >= PATIENCE]
        middle = median(found) if found else 0.0
        return middle if middle > NOTHING else None

    def figures(self) -> dict[int, dict[str, float]]:
        return {
            member: {"merit": mean.value, "rejected": self._rejected.get(member, 0)}
            for member, mean in sorted(self._means.items())
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a gate that takes over."""
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


@dataclass(slots=True)
class _Mean:
    """The moving mean of a trainer's measurements."""

    value: float = 0.0
    count: int = 0
    spread: float = 0.0
    """The variance of single measurements."""

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return math.sqrt(self.spread * MERIT_SMOOTHING / (2 - MERIT_SMOOTHING))

    def add(self, value: float) -> None:
        self.count += 1
        # The plain mean while there are few, so that the first one does not weigh more than others.
        new, moved = max(MERIT_SMOOTHING, 1 / self.count), value - self.value
        self.value += new * moved
        self.spread = (1 - new) * (self.spread + new * moved * moved)
