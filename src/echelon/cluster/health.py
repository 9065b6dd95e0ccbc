"""What the supervisor knows of each member, and which member caused a failure.

member ── step and activity, in shared memory ──▶ `Pulses` ── read ──▶ `Beat` ──┐
member ── its error as JSON, through a pipe ──▶ `Fault` ────────────────────────┼─▶ `End`
kernel ── exit status ─────────────────────────────────────────────────────────┘     │
                                                     all ends ──▶ `verdict` ──▶ one error
"""

from __future__ import annotations

import json
import mmap
import re
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from traceback import TracebackException
from typing import Any, NamedTuple

from echelon.comm.peers import is_torn
from echelon.core.errors import EchelonError, Interrupted, PeerError, TrainingError

_HINTS: dict[int, str] = {
    signal.SIGKILL: ": perhaps out of memory (look at dmesg)",
    signal.SIGBUS: ": perhaps memory ran out (look at the limits of its cgroup)",
    signal.SIGSEGV: ": a crash in native code",
    signal.SIGABRT: ": native code gave up",
}


# A slot: step (int64), moment (float64), then what the member is doing, as text.
_SLOT = 128
_TEXT = 16
_ROOM = _SLOT - _TEXT
_NEVER = -1


# Heartbeats: from each member to the supervisor, through shared memory.


class Pulses:
    """Heartbeats in memory shared with all processes forked later, one slot per member.

    Writing one costs a store or two and never waits.
    """

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * _SLOT)
        self._view = memoryview(self._memory)
        self._steps = self._view.cast("q")
        self._moments = self._view.cast("d")
        for index in range(count):
            self._steps[index * (_SLOT // 8)] = _NEVER
            self._moments[index * (_SLOT // 8) + 1] = time.monotonic()

    def beat(self, index: int, step: int) -> None:
        """Write a heartbeat. Both stores are aligned: a reader never sees half a number."""
        at = index * (_SLOT // 8)
        self._steps[at] = step
        self._moments[at + 1] = time.monotonic()

    def describe(self, index: int, doing: str) -> None:
        text = doing.encode()[:_ROOM]
        start = index * _SLOT + _TEXT
        self._view[start : start + _ROOM] = text.ljust(_ROOM, b"\0")

    def read(self, index: int) -> Beat:
        at = index * (_SLOT // 8)
        start = index * _SLOT + _TEXT
        text = bytes(self._view[start : start + _ROOM]).rstrip(b"\0")
        step = self._steps[at]
        return Beat(
            None if step == _NEVER else step, text.decode(errors="ignore"), self._moments[at + 1]
        )

    def close(self) -> None:
        for view in (self._steps, self._moments, self._view):
            view.release()
        self._memory.close()


class Beat(NamedTuple):
    """A member's last heartbeat. `moment` is `time.monotonic`; `step` is None before the first."""

    step: int | None
    doing: str
    moment: float

    @property
    def where(self) -> str:
        """For error messages: "at step 12 (compute)"."""
        if self.step is None:
            return "before its first step"
        return f"at step {self.step:,} ({self.doing})" if self.doing else f"at step {self.step:,}"


# Errors: from a member to the supervisor, as JSON.


@dataclass(frozen=True, slots=True)
class Fault:
    """An error that a member raised, as plain data on its way to the supervisor."""

    kind: str
    message: str
    echelon: list[str] = field(default_factory=list)
    """The error's classes below `EchelonError`, nearest first; empty for a bug."""
    details: dict[str, Any] = field(default_factory=dict)
    """The error's own attributes, as far as they are plain data."""
    traceback: str | None = None
    """Only for a bug: an `EchelonError` is reported in one line."""
    follow_on: bool = False
    """Whether the error only says that another member is gone."""
    interrupt: bool = False

    @property
    def line(self) -> str:
        first = next((text for text in self.message.splitlines() if text.strip()), "")
        return f"{self.kind}: {first}" if first else self.kind

    @property
    def peer(self) -> int | None:
        """The member that a follow-on error is about: the first one named in its message."""
        named = re.search(r"\bmember (\d+)\b", self.message)
        return int(named[1]) if named else None

    def rebuilt(self) -> EchelonError | None:
        """Return an error of the same class with the same message; None if it was a bug."""
        known = {cls.__name__: cls for cls in _family(EchelonError)}
        for name in self.echelon:
            if name in known:  # a class that only the member imported is not: use its base class
                error = known[name].__new__(known[name], self.message)
                for key, value in self.details.items():
                    setattr(error, key, tuple(value) if isinstance(value, list) else value)
                return error
        return None


def fault_of(error: BaseException) -> dict[str, Any]:
    """Return the fields of a `Fault` for this error, as plain data for the pipe."""
    described = TracebackException.from_exception(error)
    meant = isinstance(error, EchelonError)
    return asdict(
        Fault(
            kind=type(error).__name__,
            message=str(described),
            echelon=[cls.__name__ for cls in type(error).__mro__ if issubclass(cls, EchelonError)],
            details={k: v for k, v in vars(error).items() if meant and _is_plain(v)},
            traceback=None if meant else "".join(described.format()),
            follow_on=isinstance(error, PeerError) or is_torn(error),
            interrupt=isinstance(error, KeyboardInterrupt),
        )
    )


def _is_plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _family(root: type[EchelonError]) -> Iterator[type[EchelonError]]:
    yield root
    for child in root.__subclasses__():
        yield from _family(child)


# How members ended, and the error that the run ends with.


@dataclass(slots=True)
class End:
    """How one member's process ended."""

    index: int
    pid: int
    order: int
    """Position in the order in which failures and ends were noticed."""
    status: int
    beat: Beat
    fault: Fault | None = None
    finished: bool = False
    """Whether it sent a result."""
    sent: set[int] = field(default_factory=set)
    """Signals that the supervisor had sent to it."""

    @property
    def failed(self) -> bool:
        """Whether it raised an error, or ended without a result and not by the supervisor."""
        return self.fault is not None or not (self.finished or -self.status in self.sent)

    @property
    def interrupted(self) -> bool:
        return self.fault is not None and self.fault.interrupt

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key, the likeliest cause first: SIGKILL is never a consequence of another member's
        failure, losing a peer always is."""
        if self.fault is not None and self.fault.follow_on:
            return 2, self.order
        return (0 if self.status == -signal.SIGKILL else 1), self.order


def verdict(
    ends: Sequence[End],
    seen: Mapping[int, tuple[Beat, float]],
    forwarded: Sequence[int],
    count: int | None = None,
) -> BaseException | None:
    """Return the one error to raise for a run, or None if all went well.

    `seen` has each member's last heartbeat when the first failure was noticed, with its age in
    seconds at that time. `forwarded` are the signals that were passed on to the members. `count`
    is the number of members, if `ends` does not contain all of them.
    """
    failures = sorted((end for end in ends if end.failed), key=lambda end: end.rank)
    causes = [end for end in failures if end.rank[0] < 2]
    broken = [end for end in causes if not end.interrupted]
    if broken:
        return _blamed(broken[0], count or len(ends))
    if any(end.finished for end in ends if end.index == 0):
        return None  # the remaining failures are about peers that had finished and left
    cut_short = len(forwarded) > 1 or any(-end.status in forwarded for end in ends)
    if causes or cut_short:
        number = forwarded[-1] if forwarded else signal.SIGINT
        return Interrupted(f"stopped by {signal.Signals(number).name}")
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
    """Return the error for members that only report a lost peer, while no member explains itself.

    Blame the first named peer that raised no error itself; if there is none, the member that is
    furthest behind.
    """
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


class MemberFailed(TrainingError):
    """A member failed with a bug or was killed. `traceback` is the member's, if there is one."""

    def __init__(self, message: str, member: int, traceback: str | None = None) -> None:
        super().__init__(message)
        self.member = member
        self.traceback = traceback
        self.facts: dict[str, Any] = {}
        if traceback is not None:
            self.add_note(f"In member {member}:\n{traceback.rstrip()}")
