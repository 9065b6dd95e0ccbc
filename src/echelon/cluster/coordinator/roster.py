"""Who takes part, as the coordinator knows them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from echelon.cluster.coordinator.frames import Message

BEAT = 0.25
"""Seconds between two signs of life."""
BUSY = 0.2
"""Of the time between two beats, the part on a core from which on a member computes."""
_LONGEST_GAP = 2.0  # a pause that was forgiven does not make the next one usual


@dataclass(slots=True)
class Arrival:
    """A member that left its generation and waits for the next."""

    order: int
    """Counts arrivals."""
    progress: list[int]


@dataclass(slots=True)
class Member:
    """One that said hello and is not lost."""

    id: int
    pid: int
    host: str
    name: str
    number: int | None = None
    """Its place among those started together."""
    local: bool = False
    """Whether its process is one of this host's."""
    generation: int = 0
    """The one it is in; 0: a newcomer."""
    arrival: Arrival | None = None
    heard: float = 0.0
    gap: float = 4 * BEAT
    """Seconds between its beats, as usual. One that has just begun may have its hands full."""
    away: float | None = None
    """Since when it has no connection."""
    step: int | None = None
    doing: str = ""
    moved: float = 0.0
    """When its step was last another one."""
    since: float = 0.0
    """Since when it does what it does, where it does it."""
    pace: float | None = None
    cpu: float | None = None
    busy: bool = False
    """Whether it used a core between its last two beats."""
    seq: int = 0
    """The last of its numbered frames that was dealt with."""

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
class Roster:
    """The living, those not heard of for longest first, and why the others are gone."""

    first_free: int
    """Ids below are for those started together, by number; no id is ever given twice."""
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
        """The member of this host with this process."""
        return next((m for m in self if m.pid == pid and m.local), None)

    def heard(self, member: Member, now: float) -> None:
        member.heard = now
        self.living.move_to_end(member.id)

    def beat(self, member: Member, now: float, message: Message) -> float:
        """Take note of a beat; returns how long a step took that ended with it, else 0."""
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
