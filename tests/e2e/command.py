"""The command line as a person uses it: real processes, real signals, real files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.checkpoint import Shelf

from .forks import Command

DEADLINE = 150.0

# Dropout and augmentation on purpose: both have to come back exactly after a kill.
DIGITS = [
    "task=classify",
    "data.name=digits",
    "data.augment={crop: 1, flip: true}",
    "model={name: cnn, dropout: 0.3}",
    "batch_size=64",
    "epochs=3",
    "threads=1",
    "track.report=false",
]


def echelon(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with start(*arguments, folder=folder) as command:
        output, errors = command.communicate(timeout=DEADLINE)
    assert command.returncode is not None
    return subprocess.CompletedProcess(arguments, command.returncode, output, errors)


def spawned(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as a shell would, from nothing."""
    return subprocess.run(
        [sys.executable, "-m", "echelon", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def start(*arguments: str, folder: Path) -> Command:
    """Begin a command and leave it running."""
    return Command(arguments, folder)


def last_json(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def shelf(folder: Path, run: str = "classify-0001") -> Shelf:
    return Shelf(folder / "runs" / run / "checkpoints")


def wait_for(what: Callable[[], object], process: Command) -> None:
    """Until `what` holds; a process that ends first shows its output."""
    deadline = time.monotonic() + DEADLINE
    while not what():
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}:\n{process.errors}")
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.005)


def final_weights(folder: Path, run: str = "classify-0001") -> dict[str, Tensor]:
    found: dict[str, Tensor] = shelf(folder, run).load("last")["strategy"]["model"]
    return found
