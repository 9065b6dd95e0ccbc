"""Heartbeats; errors across processes; which worker caused a failure."""

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
from echelon.core.errors import EchelonError, PeerError, TrainingError

# --- fault ---
# An error on its way from a member to the supervisor, as plain data.


@dataclass(frozen=True, slots=True)
class Fault:
    """What a member raised."""

    kind: str
    message: str
    echelon: list[str] = field(default_factory=list)
    """The error's classes below `EchelonError`, nearest first; empty for a bug."""
    details: dict[str, Any] = field(default_factory=dict)
    """The error's own attributes, as far as they are plain."""
    traceback: str | None = None
    """Only for a bug: an error that was meant is one line."""
    follow_on: bool = False
    """Whether it only says that another member is gone."""
    interrupt: bool = False

    @property
    def line(self) -> str:
        first = next((text for text in self.message.splitlines() if text.strip()), "")
        return f"{self.kind}: {first}" if first else self.kind

    @property
    def peer(self) -> int | None:
        """The member that a follow-on error is about: the first that its text names."""
        named = re.search(r"\bmember (\d+)\b", self.message)
        return int(named[1]) if named else None

    def rebuilt(self) -> EchelonError | None:
        """The same class of error with the same text, unless it was a bug."""
        known = {cls.__name__: cls for cls in _family(EchelonError)}
        for name in self.echelon:
            if name in known:  # a class that only the member has imported is not
                error = known[name].__new__(known[name], self.message)
                for key, value in self.details.items():
                    setattr(error, key, tuple(value) if isinstance(value, list) else value)
                return error
        return None


def fault_of(error: BaseException) -> dict[str, Any]:
    """Everything the supervisor needs to know of this error, as plain data."""
    told = TracebackException.from_exception(error)
    meant = isinstance(error, EchelonError)
    return asdict(
        Fault(
            kind=type(error).__name__,
            message=str(told),
            echelon=[cls.__name__ for cls in type(error).__mro__ if issubclass(cls, EchelonError)],
            details={k: v for k, v in vars(error).items() if meant and _is_plain(v)},
            traceback=None if meant else "".join(told.format()),
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


# --- pulse ---
# Signs of life in shared memory: writing one costs a store or two and never waits.

_SLOT = 128
_TEXT = 16
"""A slot: step (int64), moment (float64), then what the member does, as text."""
_ROOM = _SLOT - _TEXT
_NEVER = -1


class Beat(NamedTuple):
    """What a member last said of itself."""

    step: int | None
    doing: str
    moment: float

    @property
    def where(self) -> str:
        """At step 12 (compute)."""
        if self.step is None:
            return "before its first step"
        return f"at step {self.step:,} ({self.doing})" if self.doing else f"at step {self.step:,}"


class Pulses:
    """One slot per member; whoever was forked after this was made shares it."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * _SLOT)
        self._view = memoryview(self._memory)
        self._steps = self._view.cast("q")
        self._moments = self._view.cast("d")
        for index in range(count):
            self._steps[index * (_SLOT // 8)] = _NEVER
            self._moments[index * (_SLOT // 8) + 1] = time.monotonic()

    def beat(self, index: int, step: int) -> None:
        """Single aligned stores: a reader never sees half a number."""
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


# --- verdict ---
# Whose fault it was that a run on several processes ended.

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
