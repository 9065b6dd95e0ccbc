"""One run of a job under a plan of faults, or under none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.cluster.chaos.controller import Controller, Stuck
from echelon.cluster.chaos.deeds import Deed
from echelon.cluster.chaos.measure import measure
from echelon.cluster.chaos.plan import Fault
from echelon.cluster.chaos.process import Command
from echelon.cluster.chaos.remains import remains, shared_memory
from echelon.cluster.chaos.scene import Entry, Tail
from echelon.core.config import Job
from echelon.core.errors import EchelonError
from echelon.data.journal import JOURNAL
from echelon.loop.audit import audit
from echelon.loop.limits import Limits

_START_SECONDS = 120.0
"""For the coordinator to be there."""
_LOOK = 0.01


@dataclass(slots=True)
class Trial:
    """What came of it."""

    plan: Sequence[Fault]
    seed: int
    run: str = ""
    folder: Path | None = None
    finished: bool = False
    seconds: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    deeds: list[Deed] = field(default_factory=list)
    epochs: int = 0
    """Finished, as its ledger says."""
    problems: list[str] = field(default_factory=list)
    """Everything that should not be."""
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


def attempt(
    job: Job,
    arguments: Sequence[str],
    plan: Callable[[int | None], Sequence[Fault]],
    *,
    name: str,
    seed: int = 0,
    patience: float,
) -> Trial:
    """Run `echelon train` with these arguments, which make `job`, under faults.

    `plan` makes them once it is known how many steps there will be, if that can be known.
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


def _begun(
    command: Command, store: Path, name: str, before: set[Path]
) -> tuple[Path, Entry] | None:
    """The folder of the run that this command began, and the first entry of its journal."""
    deadline = time.monotonic() + _START_SECONDS
    while command.status is None and time.monotonic() < deadline:
        command.drain()
        for folder in set(store.glob(f"{name}-*")) - before:
            entries = Tail(folder / JOURNAL).read()
            pids = {entry["pid"] for entry in entries if entry["kind"] == "coordinator"}
            if pids & set(command.family()):
                return folder, entries[0]
        time.sleep(_LOOK)
    return None


def _follow(
    trial: Trial, command: Command, folder: Path, patience: float, steps: int | None
) -> list[str]:
    """Returns which processes it left behind."""
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
    """The ledger's verdict, and all that is wrong."""
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
