"""Whose fault it was that a run on several processes ended."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echelon.cluster.fault import Fault
from echelon.cluster.pulse import Beat
from echelon.core.errors import EchelonError, TrainingError

_HINTS: dict[int, str] = {
    signal.SIGKILL: ": perhaps out of memory (look at dmesg)",
    signal.SIGBUS: ": perhaps memory ran out (look at the limits of its cgroup)",
    signal.SIGSEGV: ": a crash in native code",
    signal.SIGABRT: ": native code gave up",
}


class MemberFailed(TrainingError):
    """A member broke down. Its text is one line; `traceback` is the member's, if it had one."""

    def __init__(self, message: str, member: int, traceback: str | None = None) -> None:
        super().__init__(message)
        self.member = member
        self.traceback = traceback
        self.facts: dict[str, Any] = {}
        if traceback is not None:
            self.add_note(f"In member {member}:\n{traceback.rstrip()}")


class Interrupted(KeyboardInterrupt):
    """The members were made to end by Ctrl-C or SIGTERM before they were done."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.facts: dict[str, Any] = {}


@dataclass(slots=True)
class End:
    """How one member's process ended."""

    index: int
    pid: int
    order: int
    """The order in which ends came to be known."""
    status: int
    beat: Beat
    fault: Fault | None = None
    finished: bool = False
    """Whether it gave a result."""
    sent: set[int] = field(default_factory=set)
    """Signals it had got from us."""

    @property
    def failed(self) -> bool:
        """Not done, and not ended by ourselves."""
        return self.fault is not None or not (self.finished or -self.status in self.sent)

    @property
    def interrupted(self) -> bool:
        return self.fault is not None and self.fault.interrupt

    @property
    def rank(self) -> tuple[int, int]:
        """A kill from outside is never a consequence; losing a peer always is."""
        if self.fault is not None and self.fault.follow_on:
            return 2, self.order
        return (0 if self.status == -signal.SIGKILL else 1), self.order


def verdict(
    ends: Sequence[End],
    seen: Mapping[int, tuple[Beat, float]],
    forwarded: Sequence[int],
    count: int | None = None,
) -> BaseException | None:
    """The one error to raise, or None if all went well.

    `seen` has each member's last sign of life when the first failure was noticed, and how many
    seconds old it was then; `forwarded` the signals that were passed on to the members. `count`
    is how many members there were, if not all of them are to be judged.
    """
    failures = sorted((end for end in ends if end.failed), key=lambda end: end.rank)
    causes = [end for end in failures if end.rank[0] < 2]
    broken = [end for end in causes if not end.interrupted]
    if broken:
        return _blamed(broken[0], count or len(ends))
    if any(end.finished for end in ends if end.index == 0):
        return None  # whoever still missed a peer missed one that was done
    cut_short = len(forwarded) > 1 or any(-end.status in forwarded for end in ends)
    if causes or cut_short:
        return Interrupted(forwarded[-1] if forwarded else signal.SIGINT)
    return _lost(ends, failures[0], seen)


def _blamed(end: End, count: int) -> EchelonError:
    who = named(end.index, count, end.pid)
    if end.fault is None:
        return MemberFailed(f"{who} {_death(end)}", end.index)
    meant = end.fault.rebuilt()
    if meant is not None:
        return meant
    text = f"{who} failed {end.beat.where}: {end.fault.line}"
    return MemberFailed(text, end.index, end.fault.traceback)


def _death(end: End) -> str:
    if end.status >= 0:
        return f"ended without a word {end.beat.where}: exit code {end.status}"
    number = -end.status
    known = number in set(signal.Signals)
    name = f" ({signal.Signals(number).name})" if known else ""
    return f"was killed by signal {number}{name} {end.beat.where}{_HINTS.get(number, '')}"


def _lost(ends: Sequence[End], first: End, seen: Mapping[int, tuple[Beat, float]]) -> MemberFailed:
    """Members lost another one that said nothing itself: the one they name, or the last one."""
    assert first.fault is not None
    silent = {end.index for end in ends if end.fault is None}
    named_by = [end.fault.peer for end in ends if end.fault is not None]
    found = next((peer for peer in named_by if peer in silent), None)
    if found is None:
        behind = silent or {end.index for end in ends}
        found = min(behind, key=lambda index: (_step(seen[index][0]), seen[index][0].moment))
    beat, age = seen[found]
    end = next(end for end in ends if end.index == found)
    who = named(found, len(ends), end.pid)
    return MemberFailed(
        f"{who} gave its last sign of life {age:.1f} s before it was missed, {beat.where}; "
        f"member {first.index}: {first.fault.message}",
        found,
    )


def _step(beat: Beat) -> int:
    return -1 if beat.step is None else beat.step


def named(index: int, count: int, pid: int) -> str:
    return f"member {index} of {count} (pid {pid} on {socket.gethostname()})"
