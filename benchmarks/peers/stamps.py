"""Who applied which update when: one line per optimizer step, written by the same hook everywhere.

    moment pid step        the clock that all processes of a machine share; as Adam counts steps

Lines are short and appended by one system call each, so processes need not know of each other.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class Stamp(NamedTuple):
    """One update that one process has applied."""

    moment: float
    pid: int
    step: int


def stamp_steps(path: Path) -> None:
    """From now on every step of every optimizer of this process, and of its forks, is written."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def stamp(optimizer: Optimizer, *_: Any) -> None:
        step = int(next(iter(optimizer.state.values()))["step"])
        os.write(handle, b"%.6f %d %d\n" % (time.monotonic(), os.getpid(), step))

    register_optimizer_step_post_hook(stamp)


def read_stamps(path: Path) -> list[Stamp]:
    """What was written so far, in the order in which it was."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [
        Stamp(float(at), int(pid), int(step))
        for at, pid, step in map(bytes.split, whole.splitlines())
    ]
