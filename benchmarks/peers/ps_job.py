"""What every parameter server trains, and how its trainers' steps are counted."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import work
from .work import Work

TRAINERS = 2
BATCH = 64
LR = 0.05
WIDTH = 2048
STARTED = 120.0
"""Seconds until the others have to be there, however busy the machine is."""


class Finding(NamedTuple):
    """What one round of one side says."""

    rate: float
    """Steps per second of all trainers together."""
    loss: float


@dataclass(frozen=True, slots=True)
class Job:
    """One round; small enough to be handed to every process, which reads the data for itself."""

    data: Path
    folder: Path
    """For what the processes leave each other."""
    warmup: int
    steps: int
    """Of each trainer, as `warmup` is."""

    @property
    def total(self) -> int:
        return self.warmup + self.steps

    @property
    def ticks(self) -> Path:
        return self.folder / "ticks"

    def work(self) -> Work:
        images = work.cnn(self.data)
        x = images.x.flatten(1).contiguous()
        return replace(images, name="wide", x=x, batch_size=BATCH, build=wide)

    def batches(self, trainer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of one trainer, cut beforehand, and as many of them as it makes steps."""
        whole = self.work()
        cut = list(zip(whole.x.split(BATCH), whole.y.split(BATCH), strict=True))
        return islice(cycle(cut[trainer::TRAINERS]), self.total)

    def meet(self, trainer: int) -> None:
        """Until all trainers are as far: none of them computes while another is still starting."""
        (self.folder / f"ready-{trainer}").touch()
        until = time.monotonic() + STARTED
        while len(list(self.folder.glob("ready-*"))) < TRAINERS:
            assert time.monotonic() < until, f"alone after {STARTED:g} s"
            time.sleep(0.001)

    def rate(self) -> float:
        return rate(self.ticks, self.warmup)


def wide() -> nn.Module:
    """784 → 2048 → 2048 → 10: 5.8 million parameters, few operations for each of them."""
    return nn.Sequential(
        nn.Linear(784, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )


class Ticks:
    """Every trainer appends a line at the same point of each of its steps.

    Lines are short and written by one system call each (2 µs), so trainers need not know of each
    other; the clock is the one that all processes of a machine share.
    """

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def tick(self, amount: int = 1) -> None:
        os.write(self._handle, b"%.6f %d %d\n" % (time.monotonic(), os.getpid(), amount))


class Tick(NamedTuple):
    """`amount` is of what begins at that moment: a step, or so many samples."""

    moment: float
    amount: int


def read_ticks(path: Path) -> dict[int, list[Tick]]:
    """By the trainer's pid."""
    found: dict[int, list[Tick]] = defaultdict(list)
    for line in path.read_text(encoding="ascii").splitlines():
        moment, pid, amount = line.split()
        found[int(pid)].append(Tick(float(moment), int(amount)))
    return dict(found)


def rate(path: Path, warmup: int, trainers: int = TRAINERS) -> float:
    """The sum of the trainers' rates while all were warm and none had finished."""
    ticks = read_ticks(path)
    assert len(ticks) == trainers, f"{len(ticks)} trainers made steps"
    began = max(mine[warmup].moment for mine in ticks.values())
    ended = min(mine[-1].moment for mine in ticks.values())
    return sum(own_rate(mine, began, ended) for mine in ticks.values())


def own_rate(ticks: list[Tick], began: float, ended: float) -> float:
    """Between its first and its last tick of that time, so that only whole steps count."""
    within = [tick for tick in ticks if began <= tick.moment <= ended]
    assert len(within) > 1, f"{len(within)} steps between the slowest warm-up and the first end"
    return sum(tick.amount for tick in within[:-1]) / (within[-1].moment - within[0].moment)


def loss_of(done: Work, weights: list[Tensor]) -> float:
    """The loss of a model with these parameters."""
    model = done.model()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    return work.loss_after(done, model)
