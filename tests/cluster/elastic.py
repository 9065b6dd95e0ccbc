"""Helpers that start whole elastic runs and disturb them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.data.journal import JOURNAL, entries
from tests.cluster.shared import is_alive
from tests.e2e.command import DEADLINE, echelon, final_weights, last_json, start, wait_for
from tests.e2e.forks import Command

STEPS, EPOCHS, BATCH, SAMPLES = 100, 5, 30, 600
RUN = "digest-0001"

# Sixty steps take longer than it takes until the journal tells of some of them. At its 60th a
# member waits until there is a file `go`: so what is to happen to a run happens to one that is
# under way, however busy the machine is.
FORWARD = """
import time
from pathlib import Path

CALLS = 0

def forward(model, batch):
    global CALLS
    CALLS += 1
    time.sleep(0.008)
    while CALLS == 60 and not Path("go").exists():
        time.sleep(0.005)
    return model(batch["x"])
"""
TASK = """
import torch
from echelon import Task, cross_entropy

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

def task():
    x = torch.randn(600, 8, generator=torch.Generator().manual_seed(0))
    return Task(
        model=model, loss=cross_entropy, forward=forward,
        train={"x": x, "y": x[:, :3].argmax(1)},
    )
"""
JOB = [
    "task=mine.py:task",
    "name=digest",
    "optimizer={name: momentum, lr: 0.05}",
    f"batch_size={BATCH}",
    f"epochs={EPOCHS}",
    "threads=1",
    "track.report=false",
    "checkpoint.every=never",
]
ENDLESS = ["epochs=100000", "checkpoint.every=50"]


class Running:
    """A command that trains, and what its journal says."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.command, self.folder = command, folder

    @property
    def run(self) -> Path:
        return self.folder / "runs" / RUN

    def said(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Lines of the journal of this kind, with these values."""
        return [
            entry
            for entry in entries(self.run / JOURNAL)
            if entry["kind"] == kind and all(entry.get(k) == v for k, v in fields.items())
        ]

    def wait(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Until the journal has such a line: the first of them."""
        wait_for(lambda: self.said(kind, **fields), self.command)
        return self.said(kind, **fields)[0]

    def reach(self, version: int) -> None:
        def reached() -> bool:
            return any(entry["last"] >= version for entry in self.said("committed"))

        wait_for(reached, self.command)

    def pid(self, member: int) -> int:
        found: int = self.said("joined", member=member)[0]["pid"]
        return found

    def pids(self) -> list[int]:
        joined = self.said("joined") + self.said("coordinator")
        return [entry["pid"] for entry in joined]

    def go(self) -> None:
        (self.folder / "go").touch()

    def end(self, code: int) -> tuple[str, str]:
        """Its end: what it printed."""
        output, errors = self.command.communicate(timeout=DEADLINE)
        assert self.command.returncode == code, errors
        return output, errors

    def stop(self) -> tuple[str, str]:
        os.kill(self.command.pid, signal.SIGINT)
        return self.end(130)


@contextmanager
def running(
    folder: Path, *settings: str, workers: int, forward: str = FORWARD
) -> Iterator[Running]:
    """A run under way; afterwards nothing of it is left but its folder."""
    prepare(folder, forward)
    words = ("train", *JOB, "strategy=all_reduce", f"workers={workers}", *settings)
    with start(*words, "-q", folder=folder) as command:
        here = Running(command, folder)
        yield here
        assert command.poll() is not None, "the test has not seen its end"
    assert not [pid for pid in here.pids() if is_alive(pid)]
    assert not (here.run / "join").exists()


def prepare(folder: Path, forward: str = FORWARD) -> None:
    (folder / "mine.py").write_text(forward + TASK)


def undisturbed(folder: Path) -> dict[str, Tensor]:
    """The weights that one process ends on."""
    prepare(folder)
    (folder / "go").touch()
    last_json(echelon("train", *JOB, "--json", "-q", folder=folder))
    return final_weights(folder, RUN)


def proved(folder: Path) -> list[str]:
    """The ledger's verdict: exactly once, or the test fails. Returns what it printed."""
    done = echelon("runs", "ledger", RUN, "--verify", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def difference(folder: Path, weights: dict[str, Tensor]) -> float:
    """Of the last checkpoint, relative to the largest weight."""
    found = final_weights(folder, RUN)
    assert found.keys() == weights.keys()
    return max(
        float((found[name] - weight).abs().max() / weight.abs().max())
        for name, weight in weights.items()
    )


def join(folder: Path, text: str | None = None) -> Command:
    return start("join", text or f"runs/{RUN}", "-q", folder=folder)
