"""What the coordinator knows of the members: who they are, whether they live, how fast they are.

Roster     the members that said hello and are not lost, and why the others are gone
Liveness   which members to give up: silent ones, after asking the kernel about local processes
Lateness   how long a member may take to leave its generation
Speeds     samples per second, relative to the mean
look       a process of this host as the kernel shows it (/proc)
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from echelon.cluster.coordinator.effects import (
    BUSY_LATE,
    LATE,
    LATE_STEPS,
    PATIENCE,
    QUIET,
    QUIET_GAPS,
    RECONNECT,
    RETURN,
)
from echelon.cluster.coordinator.protocol import BEAT, Message

BUSY = 0.2
"""A member that used a core for this part of the time between two heartbeats is computing."""
_LONGEST_GAP = 2.0
"""Longer gaps count as this many seconds, so that one forgiven pause does not look usual."""
_HALF = QUIET / 2
"""Minimum seconds between two looks at a process, to see whether it computed in between."""
_EVERY = 0.5
"""Seconds between two computations of the mean."""


@dataclass(slots=True)
class Roster:
    """The living members, the longest silent first, and why the others are gone."""

    first_free: int
    """Lower ids are reserved for the members started together; no id is given twice."""
    living: OrderedDict[int, Member] = field(default_factory=OrderedDict)
    gone: dict[int, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Member]:
        return iter(self.living.values())

    def __len__(self) -> int:
        return len(self.living)

    def get(self, member: int) -> Member | None:
        return self.living.get(member)

    def new_id(self, number: int | None) -> int:
        if number is not None and number < self.first_free and not self.known(number):
            return number
        while self.known(self.first_free):
            self.first_free += 1
        return self.first_free

    def known(self, member: int) -> bool:
        return member in self.living or member in self.gone

    def enter(self, member: Member) -> None:
        self.living[member.id] = member

    def remove(self, member: Member, why: str) -> None:
        del self.living[member.id]
        self.gone[member.id] = why

    def with_pid(self, pid: int) -> Member | None:
        """Return the member of this host with this process id, or None."""
        return next((m for m in self if m.pid == pid and m.local), None)

    def heard(self, member: Member, now: float) -> None:
        member.heard = now
        self.living.move_to_end(member.id)

    def beat(self, member: Member, now: float, message: Message) -> float:
        """Record a heartbeat; return the seconds per step if the step has advanced, else 0."""
        gap = now - member.heard
        member.gap += 0.3 * (min(gap, _LONGEST_GAP) - member.gap)
        cpu = message.get("cpu")
        if cpu is not None and member.cpu is not None and gap > 0:
            member.busy = cpu - member.cpu >= BUSY * gap
        pace = message.get("pace")
        member.cpu, member.pace = cpu, pace if pace is not None and 1e-12 < pace < 1e12 else None
        step, doing = message.get("step"), message["doing"]
        if (step, doing) != (member.step, member.doing):
            member.since, member.doing = now, doing
        return self._stepped(member, now, step)

    def _stepped(self, member: Member, now: float, step: int | None) -> float:
        before, member.step = member.step, step
        if step == before:
            return 0.0
        took, member.moved = now - member.moved, now
        if step is None or before is None or step < before:
            return 0.0
        return took / (step - before)


@dataclass(slots=True)
class Member:
    """A process that said hello and is not lost."""

    id: int
    pid: int
    host: str
    name: str
    number: int | None = None
    """Its place among the members started together; None for one that joined."""
    local: bool = False
    """Whether its process runs on the coordinator's host."""
    generation: int = 0
    """The generation it is in; 0 for a newcomer."""
    arrival: Arrival | None = None
    heard: float = 0.0
    """Time of its last frame."""
    gap: float = 4 * BEAT
    """Moving average of the seconds between its heartbeats. Generous at first: a process that
    starts is busy."""
    away: float | None = None
    """Since when it has no connection."""
    step: int | None = None
    doing: str = ""
    moved: float = 0.0
    """When its step changed."""
    since: float = 0.0
    """When its step or its activity (`doing`) changed."""
    pace: float | None = None
    """Seconds per sample."""
    cpu: float | None = None
    """Seconds of CPU time used so far."""
    busy: bool = False
    """Whether it was computing between its last two heartbeats."""
    seq: int = 0
    """The highest sequence number of its frames that was handled."""

    def __str__(self) -> str:
        return f"member {self.id} (pid {self.pid} on {self.host.partition('/')[0]})"

    @property
    def where(self) -> str:
        if self.step is None:
            return f"before its first step{f' ({self.doing})' if self.doing else ''}"
        return f"at step {self.step:,}{f' ({self.doing})' if self.doing else ''}"

    def public(self) -> Message:
        return {"id": self.id, "host": self.host, "pid": self.pid, "name": self.name}


@dataclass(slots=True)
class Arrival:
    """The state of a member that left its generation and waits for the next one."""

    order: int
    """Position in the order of all arrivals."""
    progress: list[int]


class Liveness:
    """Finds lost members by missing heartbeats and, for processes of this host, in /proc."""

    def __init__(self, roster: Roster, look: Look) -> None:
        self.restarted: float | None = None
        """When this coordinator took over from a previous one."""
        self._roster, self._look = roster, look
        self._seen: dict[int, tuple[float, Sight]] = {}

    def losses(self, now: float) -> list[Loss]:
        """Return the members to give up now."""
        found = []
        # The longest silent come first, so that few have to be looked at.
        for member in self._roster:
            if now - member.heard < _HALF:
                break
            loss = self._away(member, now) if member.away is not None else self._mute(member, now)
            if loss is not None:
                found.append(loss)
        return found

    def suspected(self, member: Member) -> Loss | None:
        """Judge a member that another one blames: a stopped process is given up at once."""
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
        # A process in state R that gets no CPU time is not at fault: the machine is overloaded.
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


class Loss(NamedTuple):
    """A member to give up."""

    member: Member
    how: str
    """`killed`, `frozen`, `silent`, `left` or `error`."""
    why: str


class Lateness:
    """How long a member may take to leave its generation, from the longest step of this generation
    and the one before."""

    def __init__(self) -> None:
        self._longest = self._before = 0.0

    def formed(self) -> None:
        """Start a new generation."""
        self._longest, self._before = 0.0, self._longest

    def stepped(self, seconds: float) -> None:
        """Count the duration of a member's step."""
        self._longest = max(self._longest, seconds)

    def lasts(self, member: Member, now: float) -> None:
        """Count the unfinished step of a member that is ordered to regroup."""
        if member.step is not None:
            self.stepped(now - member.moved)

    def is_late(self, member: Member, seconds: float) -> bool:
        """Return whether a member should have arrived `seconds` after it was ordered to."""
        limit = max(LATE, LATE_STEPS * max(self._longest, self._before))
        return seconds > (max(limit, BUSY_LATE) if member.busy else limit)


class Speeds:
    """Samples per second, relative to the mean. A member with an unknown pace counts as 1."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._mean: float | None = None
        self._sum = 1.0
        self._taken = float("-inf")

    def tick(self, now: float) -> None:
        """Update the mean now and then; for every lease it would take longer than the lease."""
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
        """Return the sum of all speeds; at least `speed`, that of one member."""
        return max(self._sum, speed)


def look(pid: int) -> Sight | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # the process has ended, or ends just now
        return None
    # The command's name stands before these fields, in brackets, and may contain anything.
    fields = text.rpartition(") ")[2].split()
    if fields[0] in "ZXx":
        return None
    return Sight(fields[0], int(fields[11]) + int(fields[12]))


class Sight(NamedTuple):
    """The state of a process at one moment."""

    state: str
    """R: runs or is ready to; S, D: waits; T, t: stopped."""
    ticks: int
    """CPU time so far, of all its threads, in clock ticks."""

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


Look = Callable[[int], Sight | None]
"""Process id → its state; None if the process has ended."""


def handle_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when this process ends; None if it has ended."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
