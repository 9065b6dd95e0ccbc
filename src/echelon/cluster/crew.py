"""The members' processes, as their parent holds them: started, signalled, reaped."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from echelon.cluster.child import Work, live
from echelon.cluster.member import Member
from echelon.cluster.pipes import Pipes
from echelon.cluster.pulse import Pulses
from echelon.cluster.signals import held_back
from echelon.comm.peers import Place
from echelon.core.errors import TrainingError

_UNKILLABLE_SECONDS = 2.0


@dataclass(slots=True)
class Child:
    """One member's process."""

    index: int
    pid: int
    handle: int
    """Its pidfd: readable once it has ended; a signal through it never hits another process."""
    sent: set[int] = field(default_factory=set)
    """Signals it got from us."""
    status: int | None = None
    """Exit code, or minus the signal that ended it; None while it lives."""

    def signal(self, number: int) -> None:
        if self.status is None:
            self.sent.add(number)
            with suppress(ProcessLookupError):  # ended, not reaped yet
                signal.pidfd_send_signal(self.handle, number)

    def signal_group(self, number: int) -> None:
        """To it and to what it started. Until it is reaped its number is nobody else's."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Take note of its end, and end what it left running in its group."""
        self.signal_group(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)


class Crew:
    """All members of a run on this machine."""

    def __init__(self, count: int, besides: Iterable[int] = ()) -> None:
        self.count = count
        try:
            self.pipes = Pipes(count, besides)
        except OSError as error:
            raise _refused(f"{count} members", error) from None
        self.children: list[Child] = []

    @property
    def alive(self) -> list[Child]:
        return [child for child in self.children if child.status is None]

    def start(self, work: Work, pulses: Pulses, deadline: float) -> None:
        """Fork every member."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()  # or each member would print it again
        gc.freeze()  # a collection in a member would write to, and so copy, all it looks at
        try:
            with held_back():
                for index in range(self.count):
                    self._fork(index, work, pulses, deadline)
        except OSError as error:
            raise _refused(f"member {len(self.children)} of {self.count}", error) from None
        finally:
            gc.unfreeze()
        self.pipes.keep_reading()

    def signal(self, number: int) -> None:
        for child in self.alive:
            child.signal(number)

    def signal_groups(self, number: int) -> None:
        for child in self.alive:
            child.signal_group(number)

    def close(self) -> None:
        """Nobody is left, whatever happened before."""
        self.signal(signal.SIGKILL)
        patience = time.monotonic() + _UNKILLABLE_SECONDS
        for child in self.alive:
            if _ended(child.handle, patience - time.monotonic()):
                child.reap()
        self.pipes.close()

    def _fork(self, index: int, work: Work, pulses: Pulses, deadline: float) -> None:
        listener = self.pipes.listener if index == 0 else None
        place = Place(
            index=index,
            count=self.count,
            port=self.pipes.port,
            listener=listener,
            deadline=deadline,
        )
        member = Member(place, self.pipes.wires[index], pulses)
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            live(member, work, self.pipes, supervisor)
        self.children.append(Child(index, pid, self._handle(pid)))

    def _handle(self, pid: int) -> int:
        try:
            return self.pipes.own(os.pidfd_open(pid))
        except OSError:  # nobody could end it later on
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise


def _refused(what: str, error: OSError) -> TrainingError:
    hint = " (ulimit -n says how many)" if error.errno == errno.EMFILE else ""
    return TrainingError(f"{what} could not be started: {error.strerror}{hint}")


def _ended(handle: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))
