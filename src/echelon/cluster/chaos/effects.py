"""Faults that last for a while: each is ticked until it is over, and can be ended at any time."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from echelon.checkpoint import Shelf
from echelon.cluster.chaos.deeds import Deed

_PERIOD = 0.04
"""Seconds in which a slowed member runs once and stands once: far below what counts as silence."""
FULL = 512
"""Bytes that a file may have on a disk that counts as full."""
_COMPLAINT = "could not be written"
_NEXT_SECONDS = 30.0
"""How long to look out for the next checkpoint."""


class Effect(Protocol):
    """Something that is still being done to a run."""

    members: Sequence[int]

    def tick(self) -> bool:
        """Go on; returns whether it is over."""
        ...

    def end(self) -> None:
        """Leave nothing of it behind."""
        ...


class Handle:
    """A process that keeps its identity: its number may come to be another one's."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if it has ended."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Frozen:
    """A process that stands still."""

    def __init__(self, handle: Handle, members: Sequence[int], seconds: float) -> None:
        self.members = members
        self._handle = handle
        handle.send(signal.SIGSTOP)
        self._until = time.monotonic() + seconds

    def tick(self) -> bool:
        return time.monotonic() >= self._until

    def end(self) -> None:
        self._handle.send(signal.SIGCONT)
        self._handle.close()


class Slowed:
    """A process that stands still for most of every period."""

    def __init__(self, handle: Handle, members: Sequence[int], factor: float, seconds: float):
        self.members = members
        self._handle, self._runs = handle, _PERIOD / factor
        self._until = time.monotonic() + seconds
        self._next, self._stands = 0.0, False

    def tick(self) -> bool:
        now = time.monotonic()
        if now >= self._next:
            self._stands = not self._stands
            self._handle.send(signal.SIGSTOP if self._stands else signal.SIGCONT)
            self._next = now + (_PERIOD - self._runs if self._stands else self._runs)
        return now >= self._until

    def end(self) -> None:
        self._handle.send(signal.SIGCONT)
        self._handle.close()


class CutOff:
    """A member that the coordinator does not hear; the coordinator itself ends it."""

    def __init__(self, members: Sequence[int], seconds: float) -> None:
        self.members = members
        self._until = time.monotonic() + seconds

    def tick(self) -> bool:
        return time.monotonic() >= self._until

    def end(self) -> None:
        """There is nothing to undo here."""


class FullDisk:
    """The leader's files cannot grow, so its checkpoints fail; then they can again."""

    def __init__(
        self, deed: Deed, shelf: Shelf, said: Callable[[float], list[tuple[float, str]]]
    ) -> None:
        self.members: Sequence[int] = ()
        self._deed, self._shelf, self._said = deed, shelf, said
        self._pid = deed.pids[0]
        self._before: tuple[int, int] | None = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)
        _limit(self._pid, (FULL, self._before[1]))
        self._until = time.monotonic() + deed.fault.seconds
        self._newest = 0

    @property
    def is_full(self) -> bool:
        return self._before is not None

    def tick(self) -> bool:
        """Over once a checkpoint was written again."""
        deed = self._deed
        if deed.detected is None:
            complaints = (at for at, text in self._said(deed.moment) if _COMPLAINT in text)
            deed.detected = next((at - deed.moment for at in complaints), None)
        if self._before is not None:
            if time.monotonic() >= self._until:
                self._empty()
            return False
        if max(self._shelf.versions(), default=0) <= self._newest:
            return time.monotonic() > self._until + _NEXT_SECONDS
        deed.recovered = time.time() - deed.moment if deed.detected is not None else None
        return True

    def end(self) -> None:
        if self._before is not None:
            self._empty()
        if self._deed.detected is None:
            self._deed.note = "no checkpoint was due"

    def _empty(self) -> None:
        assert self._before is not None
        self._newest = max(self._shelf.versions(), default=0)
        _limit(self._pid, self._before)
        self._before = None


def _limit(pid: int, limits: tuple[int, int]) -> None:
    with suppress(ProcessLookupError):  # it was killed meanwhile
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
