"""Weights that tell how stale the gradients were that made them, whatever the server says.

Two parameters have gradients that make them count, with SGD at a learning rate of 1:

    version    one more at every update
    bases      bases[v] is one more at every update that was computed on version v

So whoever holds the weights of two versions knows what the updates in between were computed on:

    seen at 7   bases … 5:1  6:1  7:0
    seen at 8   bases … 5:2  6:1  7:0      the 8th update was computed on 5: staleness 7 - 5 = 2

Trainers write down what they hold whenever they begin a step. That both parameters agree at any
moment also shows that what a trainer holds is of one version, on however many servers it lies.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .work import SEED

ROOM = 1 << 17
"""The most updates of a run."""
WINDOW = 256
"""How far back a line tells of bases: staleness beyond it is seen as such, but not how much."""
BATCH = 32
"""A power of two: what is summed over it and divided by it is exact."""
SAMPLES = 4096 * BATCH


class Counting(nn.Module):
    """A small network with the two counters beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.version = nn.Parameter(torch.zeros(1))
        self.bases = nn.Parameter(torch.zeros(ROOM))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        counted = self.version + self.bases[self.version.detach().round().long()]
        return self.layers(x), counted.expand(len(x))


def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
    """The network learns slowly for that rate; the counters' gradients are -1."""
    logits, counted = output
    learnt = 0.05 * F.cross_entropy(logits, batch["y"], reduction="sum")
    # The counters have gradients, and no part in the loss's value.
    return learnt - (counted - counted.detach()).sum(), torch.tensor(float(len(logits)))


def data() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(SEED)
    x = torch.randn(SAMPLES, 16, generator=draw)
    return {"x": x, "y": x[:, :4].argmax(1)}


def watched(folder: Path) -> Callable[[nn.Module, Any], Any]:
    """A forward that writes down what the trainer holds, and takes its time as it likes."""
    files: dict[int, int] = {}

    def forward(model: nn.Module, batch: Any) -> Any:
        if model.training and isinstance(model, Counting):
            here = os.getpid()
            if here not in files:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                files[here] = os.open(folder / f"seen-{here}", flags, 0o600)
            os.write(files[here], _line(model))
            time.sleep(_pause())
        return model(batch["x"])

    return forward


def _line(model: Counting) -> bytes:
    with torch.no_grad():
        version = round(model.version.item())
        bases = model.bases.round()
        first = max(0, version + 1 - WINDOW)
        counts = bytes(bases[first : version + 1].clamp(0, 255).to(torch.uint8).tolist())
        return b"%d %d %s\n" % (version, int(bases.double().sum().item()), counts.hex().encode())


def _pause() -> float:
    """Mostly short, now and then long enough for others to make dozens of updates."""
    # Of no one's seed: forks of one process must not draw alike.
    draw = random.SystemRandom()
    return draw.uniform(0.1, 0.5) if draw.random() < 0.05 else draw.uniform(0, 0.02)


class Seen(NamedTuple):
    """What a trainer held."""

    version: int
    total: int
    """Of all bases."""
    bases: dict[int, int]
    """Of the last ones, those that are not 0."""


class Verdict(NamedTuple):
    """What all trainers together have seen of a run."""

    updates: int
    exact: int
    """Updates whose staleness is known exactly; of others, only how stale they were at least."""
    worst: int
    mean: float


def read_seen(files: Iterable[Path]) -> list[Seen]:
    """By version; of a line that a killed process has not finished nothing is taken."""
    lines = (line for file in files for line in file.read_bytes().split(b"\n")[:-1])
    return sorted((_seen(line) for line in lines), key=lambda seen: seen.version)


def _seen(line: bytes) -> Seen:
    version, total, counts = line.split()
    values = bytes.fromhex(counts.decode())
    first = int(version) + 1 - len(values)
    return Seen(int(version), int(total), {first + i: n for i, n in enumerate(values) if n})


def judged(seen: Sequence[Seen]) -> Verdict:
    """Raises AssertionError where weights do not fit together."""
    stale: list[int] = []
    exact = 0
    for one in seen:
        assert one.version == one.total, f"torn: {one.total} bases at version {one.version}"
    for before, after in pairwise(seen):
        if after.version == before.version:
            assert after == before, f"two different versions {after.version}"
            continue
        stale += between(before, after)
        exact += after.version - before.version == 1
    return Verdict(len(stale), exact, max(stale), sum(stale) / len(stale))


def between(before: Seen, after: Seen) -> list[int]:
    """The staleness of the updates from one version to another.

    Which of several updates was computed on which version is not known: the oldest first is how
    the worst of them is least.
    """
    new = [
        base
        for base, count in sorted(after.bases.items())
        for _ in range(count - before.bases.get(base, 0))
    ]
    missing = after.version - before.version - len(new)
    assert missing == 0, (
        f"{missing} of the updates {before.version + 1} to {after.version} were computed on "
        f"versions before {after.version + 1 - WINDOW}"
    )
    found = [before.version + at - base for at, base in enumerate(new)]
    assert min(found) >= 0, f"{new} after {before.version}: computed on what was not there yet"
    return found
