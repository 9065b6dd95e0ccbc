"""Who applied which update when: one line per optimizer step, written by the same hand everywhere.

    moment pid step        the clock that all processes of a machine share; as Adam counts steps

Lines are short and appended by one system call each, so processes need not know of each other.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import AdamW


class Stamp(NamedTuple):
    """One update that one process has applied."""

    moment: float
    pid: int
    step: int


class StampedAdamW(AdamW):
    """Writes down every step it has made, in this process and in its forks.

    The step is called without what torch wraps around it: that would import torch's compiler
    when a process makes its first step, and so be measured where the time to it is.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], path: Path, lr: float) -> None:
        super().__init__(parameters, lr=lr, fused=True)
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            inspect.unwrap(AdamW.step)(self, closure)
        step = int(next(iter(self.state.values()))["step"])
        os.write(self._handle, b"%.6f %d %d\n" % (time.monotonic(), os.getpid(), step))


def read_stamps(path: Path) -> list[Stamp]:
    """What was written so far, in the order in which it was."""
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
    return [Stamp(float(at), int(pid), int(step)) for at, pid, step in map(bytes.split, whole)]
