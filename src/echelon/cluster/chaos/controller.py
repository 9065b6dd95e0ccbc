"""Follows a run by its journal, and does what the plan says when its moment has come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from echelon.cluster.chaos.actuators import Actuators, Never, NotYet
from echelon.cluster.chaos.deeds import Deed
from echelon.cluster.chaos.plan import Fault
from echelon.cluster.chaos.process import Command
from echelon.cluster.chaos.scene import Scene

_LOOK = 0.005
"""Seconds between two looks."""
_AGAIN = 0.05
"""Seconds between two attempts at what cannot be done yet."""
GRACE = 20.0
"""Seconds in which everybody has left once the run has ended."""


class Stuck(Exception):
    """The run does not get on."""


class Controller:
    """One run, one plan."""

    def __init__(
        self,
        command: Command,
        folder: Path,
        plan: Sequence[Fault],
        *,
        seed: int,
        patience: float,
        steps: int | None,
    ) -> None:
        """`steps` is how many the run will make, if that is known."""
        self.scene = Scene(folder / "journal.jsonl")
        self.deeds: list[Deed] = []
        self._command, self._patience = command, patience
        self._actuators = Actuators(self.scene, folder, command, seed, steps)
        self._pending = list(plan)
        self._reached: dict[int, float] = {}
        """When each step that a fault waits for was reached."""
        self._why: dict[Fault, str] = {}
        """Why faults that are due have not happened yet,"""
        self._again: dict[Fault, float] = {}
        """and when to try again."""
        self._moved = time.monotonic()
        self._version = -1

    @property
    def newcomers(self) -> Sequence[Command]:
        return self._actuators.newcomers

    def follow(self) -> None:
        """Until the run has ended. Raises `Stuck` if it makes no update for too long."""
        try:
            while self._command.status is None:
                self._look()
                time.sleep(_LOOK)
        finally:
            self._actuators.close()
        self._command.drain()
        self.scene.update()
        for fault in self._pending:
            why = self._why.get(fault, f"the run ended at step {self.scene.version:,}")
            self.deeds.append(Deed(fault, skipped=why))

    def settle(self) -> list[int]:
        """Let those leave who are about to; returns who did not."""
        commands = [self._command, *self.newcomers]
        deadline = time.monotonic() + GRACE
        while left := [pid for command in commands for pid in command.family()]:
            if time.monotonic() > deadline:
                return left
            for command in commands:
                command.drain()
                _ = command.status  # reaps it
            time.sleep(0.02)
        return []

    def close(self) -> None:
        self._actuators.close()
        for command in self.newcomers:
            command.close()

    def _look(self) -> None:
        self._command.drain()
        self.scene.update()
        self._actuators.tick()
        if not self.scene.is_over:
            for fault in self._due():
                self._try(fault)
        self._check()

    def _due(self) -> list[Fault]:
        now = time.monotonic()
        for fault in self._pending:
            if fault.step <= self.scene.version:
                self._reached.setdefault(fault.step, now)
        return [
            fault
            for fault in self._pending
            if fault.step in self._reached
            and now >= max(self._reached[fault.step] + fault.delay, self._again.get(fault, now))
        ]

    def _try(self, fault: Fault) -> None:
        try:
            self.deeds.append(self._actuators.do(fault))
        except NotYet as reason:
            self._why[fault], self._again[fault] = str(reason), time.monotonic() + _AGAIN
            return
        except Never as reason:
            self.deeds.append(Deed(fault, skipped=str(reason)))
        self._pending.remove(fault)

    def _check(self) -> None:
        """Whether the run gets on; what is done to it on purpose is no standstill."""
        if self._version != self.scene.version or self._actuators.effects:
            self._version, self._moved = self.scene.version, time.monotonic()
        elif time.monotonic() - self._moved > self._patience:
            raise Stuck(f"no update for {self._patience:g} s after step {self._version:,}")
