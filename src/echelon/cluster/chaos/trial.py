"""One run under a plan of faults.

`attempt` starts the run, lets a `Controller` follow its journal and inject each fault when its step
comes, and then concludes: when each fault was detected and when the run had recovered, whether each
sample was consumed exactly once, and whether anything is left behind. The result is a `Trial`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.checkpoint.store import CHECKPOINTS
from echelon.cluster.chaos.faults import Actuators, Never, NotYet
from echelon.cluster.chaos.measure import measure
from echelon.cluster.chaos.plan import Fault
from echelon.cluster.chaos.view import Command, Deed, Entry, Scene, Tail
from echelon.cluster.start import JOIN
from echelon.core.config import Job
from echelon.core.errors import EchelonError
from echelon.data.journal import JOURNAL
from echelon.loop.journal import audit
from echelon.loop.run import Limits

_LOOK = 0.005
"""Seconds between two looks at the journal."""
_AGAIN = 0.05
"""Seconds between two attempts to inject a fault that is not possible yet."""
GRACE = 20.0
"""Seconds for all processes to end once the run has ended."""
_START_SECONDS = 120.0
"""For the run's coordinator to start."""
_START_LOOK = 0.01
"""Seconds between two looks for it."""
_MEMORY = Path("/dev/shm")


def attempt(
    job: Job,
    arguments: Sequence[str],
    plan: Callable[[int | None], Sequence[Fault]],
    *,
    name: str,
    seed: int = 0,
    patience: float,
) -> Trial:
    """Run `echelon train` under faults, with these arguments, which result in `job`.

    `plan` is called with the number of steps of the run (None if unknown) and returns the faults.
    """
    trial, store = Trial((), seed), Path(job.track.folder)
    before, memory, began = set(store.glob(f"{name}-*")), shared_memory(), time.monotonic()
    with Command(["train", *arguments, f"name={name}", "--json", "--quiet"]) as command:
        begun = _begun(command, store, name, before)
        if begun is None:
            trial.problems.append(f"the run did not start: {command.last_words}")
            return trial
        folder, entry = begun
        steps = Limits.of(job).total_steps(entry["samples"], job.batch_size)
        trial.run, trial.folder, trial.plan = folder.name, folder, plan(steps)
        left = _follow(trial, command, folder, patience, steps)
        trial.seconds = time.monotonic() - began
        trial.left_behind = [*left, *remains(folder, memory)]
    _conclude(trial, folder)
    return trial


@dataclass(slots=True)
class Trial:
    """The result of one run under a plan of faults, or without faults."""

    plan: Sequence[Fault]
    seed: int
    run: str = ""
    folder: Path | None = None
    finished: bool = False
    seconds: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    deeds: list[Deed] = field(default_factory=list)
    epochs: int = 0
    """Number of finished epochs, according to the ledger."""
    problems: list[str] = field(default_factory=list)
    """Everything that is an error of Echelon; empty for a passed trial."""
    exactly_once: bool = False
    left_behind: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = self.summary.get("metrics", {})
        return found

    def as_data(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "seed": self.seed,
            "plan": "; ".join(map(str, self.plan)),
            "finished": self.finished,
            "seconds": round(self.seconds, 1),
            "steps": self.summary.get("steps"),
            "metrics": self.metrics,
            "faults": [deed.as_data() for deed in self.deeds],
            "exactly_once": self.exactly_once,
            "left_behind": self.left_behind,
            "problems": self.problems,
        }


def _begun(
    command: Command, store: Path, name: str, before: set[Path]
) -> tuple[Path, Entry] | None:
    """Wait for the command to begin its run; return the run's folder and first journal entry."""
    deadline = time.monotonic() + _START_SECONDS
    while command.status is None and time.monotonic() < deadline:
        command.drain()
        for folder in set(store.glob(f"{name}-*")) - before:
            entries = Tail(folder / JOURNAL).read()
            pids = {entry["pid"] for entry in entries if entry["kind"] == "coordinator"}
            if pids & set(command.family()):
                return folder, entries[0]
        time.sleep(_START_LOOK)
    return None


def _follow(
    trial: Trial, command: Command, folder: Path, patience: float, steps: int | None
) -> list[str]:
    """Follow the run to its end and measure its faults; return the processes it left behind."""
    controller = Controller(
        command, folder, trial.plan, seed=trial.seed, patience=patience, steps=steps
    )
    try:
        controller.follow()
        left = controller.settle()
    except Stuck as error:
        trial.problems.append(f"the run did not finish: {error} ({command.last_words})")
        left = []
    finally:
        controller.close()
    trial.deeds = controller.deeds
    for deed in trial.deeds:
        measure(deed, controller.scene, trial.deeds)
    trial.finished = command.status == 0
    if command.status not in (0, None):
        trial.problems.append(f"the run failed: {command.last_words}")
    elif trial.finished:
        trial.summary = json.loads(command.output.splitlines()[-1])
    return [f"process {pid}" for pid in left]


def _conclude(trial: Trial, folder: Path) -> None:
    """Audit the run's ledger and collect all problems."""
    try:
        proof = audit(folder, checkpoint=True)
    except EchelonError as error:
        trial.problems.append(str(error))
        return
    trial.exactly_once = not proof.problems
    trial.epochs = sum(epoch.finished for epoch in proof.epochs)
    trial.problems += [f"not exactly once: {problem}" for problem in proof.problems]
    trial.problems += [f"left behind: {what}" for what in trial.left_behind]
    trial.problems += [deed.problem for deed in trial.deeds if deed.problem]


class Controller:
    """Follows one run and injects the faults of one plan."""

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
        """`steps` is the length of the run, if known. `patience`: seconds without an update that
        count as a hang."""
        self.scene = Scene(folder / "journal.jsonl")
        self.deeds: list[Deed] = []
        self._command, self._patience = command, patience
        self._actuators = Actuators(self.scene, folder, command, seed, steps)
        self._pending = list(plan)
        self._reached: dict[int, float] = {}
        """Step → when it was reached, for steps that a fault waits for."""
        self._why: dict[Fault, str] = {}
        """Why faults that are due have not been injected yet."""
        self._again: dict[Fault, float] = {}
        """When to try them again."""
        self._moved = time.monotonic()
        self._version = -1

    @property
    def newcomers(self) -> Sequence[Command]:
        return self._actuators.newcomers

    def follow(self) -> None:
        """Follow the run until it ends; raise `Stuck` if it makes no update for too long."""
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
        """Raise `Stuck` if the run makes no progress. While an effect lasts, that is expected."""
        if self._version != self.scene.version or self._actuators.effects:
            self._version, self._moved = self.scene.version, time.monotonic()
        elif time.monotonic() - self._moved > self._patience:
            raise Stuck(f"no update for {self._patience:g} s after step {self._version:,}")

    def settle(self) -> list[int]:
        """Wait for all processes to end; return the pids of those that do not."""
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


class Stuck(Exception):
    """The run makes no progress."""


def shared_memory() -> set[str]:
    """Return the named shared memory of all Echelon runs. (The kernel frees unnamed memory.)"""
    entries = _MEMORY.iterdir() if _MEMORY.is_dir() else ()
    return {entry.name for entry in entries if "echelon" in entry.name}


def remains(folder: Path, before: set[str]) -> list[str]:
    """Return what the ended run in `folder` left behind: memory that is not in `before`, files."""
    found = [f"shared memory {name}" for name in sorted(shared_memory() - before)]
    files = [folder / JOIN, *(folder / CHECKPOINTS).glob(".*")]
    return found + [f"file {file}" for file in files if file.exists()]
