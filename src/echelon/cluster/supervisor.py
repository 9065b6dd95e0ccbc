"""Watches over the members until the last one has ended.

a failure ─▶ 1 s to notice it by themselves ─▶ SIGTERM ─▶ 1.5 s ─▶ SIGKILL
the first Ctrl-C, SIGTERM or SIGHUP ─▶ passed on: they stop at the same step, with a checkpoint
the second ─▶ passed on: they end at once ─▶ 2 s ─▶ SIGKILL        the third ─▶ SIGKILL
Ctrl-Z ─▶ they are stopped, then the supervisor stops itself ─▶ fg or bg ─▶ all go on
member 0 is done ─▶ the others have the deadline ─▶ SIGTERM ─▶ 1.5 s ─▶ SIGKILL
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import Any

from echelon.cluster.crew import Child, Crew
from echelon.cluster.fault import Fault
from echelon.cluster.pulse import Beat, Pulses
from echelon.cluster.relay import Relay
from echelon.cluster.signals import FORWARDED, SUSPEND, suspend
from echelon.cluster.verdict import End, named, verdict
from echelon.core.format import warn
from echelon.loop.interrupt import SAME_SECONDS

NOTICE_SECONDS = 1.0
TERM_SECONDS = 1.5
IMPATIENT_SECONDS = 2.0
_KILLED_SECONDS = 2.0
_CHUNK = 1 << 16


class Supervisor:
    """What is known of the members, and what is to be done when."""

    def __init__(self, crew: Crew, pulses: Pulses, signals: int, deadline: float) -> None:
        self.facts: dict[str, Any] = {}
        self.result: dict[str, Any] = {}
        self.forwarded: list[int] = []
        self.ends: list[End] = []
        self.seen: dict[int, tuple[Beat, float]] = {}
        self._crew = crew
        self._pulses = pulses
        self._signals = signals
        self._deadline = deadline
        self._last = (0, 0.0)
        """The last signal, and when it came."""
        self._relay = Relay(crew.pipes.texts)
        self._partial = dict.fromkeys(range(crew.count), b"")
        self._finished: set[int] = set()
        self._faults: dict[int, Fault] = {}
        self._arrivals: dict[int, int] = {}
        """The order in which failures and ends came to be known."""
        self._plan: list[tuple[float, int]] = []
        """(moment, signal): what the members that are left then will get."""

    @property
    def steps(self) -> int:
        """Updates that were made: the pulse tells the one that is under way."""
        return max((end.beat.step or 1) - 1 for end in self.ends)

    def verdict(self) -> BaseException | None:
        """The one error to raise once all have ended, or None if all went well."""
        return verdict(self.ends, self.seen, self.forwarded)

    def watch(self) -> None:
        """Until every member has ended."""
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._signals, selectors.EVENT_READ, self._forward)
            for child in self._crew.children:
                self._register(self._crew.pipes.reports[child.index], self._hear, child)
                self._register(child.handle, self._reap, child)
            self._watch_more()
            while self._goes_on() and self._act():
                for key, _ in selector.select(self._patience()):
                    if key.fd in selector.get_map():  # or it was done with in this round
                        key.data()
            for child in self._crew.alive:
                warn(f"pid {child.pid} could not be ended")
                self._note(child)
        self._relay.finish()

    def _goes_on(self) -> bool:
        """Whether there is anything left to watch."""
        return bool(self._crew.alive)

    def _watch_more(self) -> None:
        """There may be others than members to look after."""

    def _register(self, descriptor: int, call: Callable[..., None], *arguments: Any) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: call(*arguments))

    def _patience(self) -> float | None:
        return max(0.0, self._plan[0][0] - time.monotonic()) if self._plan else None

    def _act(self) -> bool:
        """Send what the plan says is due; returns whether to go on waiting."""
        while self._plan and self._plan[0][0] <= time.monotonic():
            _, number = self._plan.pop(0)
            if number == 0:  # not even SIGKILL ended them: they hang in the kernel
                return False
            self._crew.signal(number)
        return True

    def _end_by(self, *steps: tuple[float, int]) -> None:
        """Send these signals after so many seconds; a plan that ends sooner stays."""
        now = time.monotonic()
        plan = [(now + seconds, number) for seconds, number in steps]
        plan.append((plan[-1][0] + _KILLED_SECONDS, 0))
        if not self._plan or plan[-1][0] < self._plan[-1][0]:
            self._plan = plan

    def _forward(self) -> None:
        """Each wish to end goes once to every member."""
        came = os.read(self._signals, _CHUNK)
        if SUSPEND in came:
            self._suspend()
        for number in filter(FORWARDED.__contains__, came):
            last, self._last = self._last, (number, time.monotonic())
            if number == last[0] and self._last[1] - last[1] < SAME_SECONDS:
                continue
            self.forwarded.append(number)
            if len(self.forwarded) > 2:
                self._end_by((0.0, signal.SIGKILL))
                continue
            self._crew.signal(number)
            if len(self.forwarded) == 2:
                self._end_by((IMPATIENT_SECONDS, signal.SIGKILL))

    def _suspend(self) -> None:
        """The terminal stops its foreground group, which members are not in."""
        self._crew.signal_groups(signal.SIGSTOP)
        began = time.monotonic()
        suspend()
        stopped = time.monotonic() - began
        self._plan = [(moment + stopped, number) for moment, number in self._plan]
        self._crew.signal_groups(signal.SIGCONT)

    def _hear(self, child: Child) -> None:
        """Read what a member sent, line by line."""
        descriptor = self._crew.pipes.reports[child.index]
        while chunk := _read(descriptor):
            *lines, rest = (self._partial[child.index] + chunk).split(b"\n")
            self._partial[child.index] = rest
            for line in lines:
                self._take(child, json.loads(line))
        if chunk == b"" and descriptor in self._selector.get_map():
            self._selector.unregister(descriptor)

    def _take(self, child: Child, message: dict[str, Any]) -> None:
        if "told" in message:
            self.facts |= message["told"]
        elif "result" in message:
            self._finished.add(child.index)
            if child.index == 0:
                self.result = message["result"]
        else:
            fault = self._faults[child.index] = Fault(**message["error"])
            self._arrivals.setdefault(child.index, len(self._arrivals))
            self._raised(fault)

    def _raised(self, _fault: Fault) -> None:
        """A member says that it cannot go on."""
        self._failed()

    def _failed(self) -> None:
        """Take down where everybody is, and let nobody wait for long."""
        if not self.seen:
            now = time.monotonic()
            beats = {child.index: self._pulses.read(child.index) for child in self._crew.children}
            self.seen = {index: (beat, now - beat.moment) for index, beat in beats.items()}
        self._end_by(
            (NOTICE_SECONDS, signal.SIGTERM), (NOTICE_SECONDS + TERM_SECONDS, signal.SIGKILL)
        )

    def _reap(self, child: Child) -> None:
        self._hear(child)  # its last words came before its end
        self._selector.unregister(child.handle)
        child.reap()
        self._note(child)

    def _note(self, child: Child) -> None:
        """Take down how a member ended."""
        end = End(
            index=child.index,
            pid=child.pid,
            order=self._arrivals.setdefault(child.index, len(self._arrivals)),
            status=-signal.SIGKILL if child.status is None else child.status,
            beat=self._pulses.read(child.index),
            fault=self._faults.get(child.index),
            finished=child.index in self._finished,
            sent=child.sent,
        )
        self.ends.append(end)
        self._missed(end)
        if child.index == 0:
            self._outlive(end)

    def _missed(self, end: End) -> None:
        """A member has ended: be it by a signal that we passed on, the others miss it."""
        if not end.finished:
            self._failed()
        if not end.failed and not end.finished and 0 in self._finished and not self.forwarded:
            who = named(end.index, self._crew.count, end.pid)
            warn(f"{who} did not end within {self._deadline:g} s of member 0 and was ended")

    def _outlive(self, first: End) -> None:
        """Member 0 has ended: print what the others say, and do not wait for them for ever."""
        for descriptor in self._relay.sources:
            self._register(descriptor, self._print, descriptor)
        if first.finished:
            self._end_by(
                (self._deadline, signal.SIGTERM), (self._deadline + TERM_SECONDS, signal.SIGKILL)
            )

    def _print(self, descriptor: int) -> None:
        if not self._relay.read(descriptor):
            self._selector.unregister(descriptor)


def _read(descriptor: int) -> bytes | None:
    """What is there: nothing at the pipe's end, None if there is no more for now."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
