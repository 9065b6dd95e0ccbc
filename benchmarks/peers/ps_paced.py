"""Trainers of known speed for parameter servers: Fashion-MNIST, and a fixed time per sample.

As in `paced`, the time of a sample is waited, as if each trainer had an accelerator of its own;
everything else is real. The first process that takes a training step is the slow one.

python -m peers.ps_paced DATA FOLDER FACTOR STEPS      one trainer alone, with SGD of its own
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import work
from .paced import Waiting, factor_here
from .ps_job import Ticks
from .work import SEED

SECONDS = 0.0005
"""Per sample, for all but one; a step takes long enough for two cores to do the rest of it."""
BATCH = 64
LR = 0.05

Forward = Callable[[nn.Module, Any], Tensor]


def model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def data(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """To train on, and held out: the last 10,000."""
    images = work.cnn(folder)
    x, y = images.x.flatten(1).contiguous(), images.y
    return {"x": x[:50_000], "y": y[:50_000]}, {"x": x[50_000:], "y": y[50_000:]}


def correct(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The metric: how many classes are right, of how many."""
    right = (output.argmax(1) == batch["y"]).sum()
    return right, torch.tensor(float(len(output)))


def paced(folder: Path, factor: int = 0) -> Forward:
    """Waits in training, and writes down how many samples each step has; 0: whoever is first."""
    ticks = Ticks(folder / "ticks")
    factors: dict[int, int] = {}

    def forward(model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(batch["x"])
        if not model.training:
            return out
        if (here := os.getpid()) not in factors:
            factors[here] = factor or factor_here(folder)
        ticks.tick(len(out))
        waited: Tensor = Waiting.apply(out, len(out) * SECONDS * factors[here])  # type: ignore[no-untyped-call]
        return waited

    return forward


def main() -> None:
    torch.set_num_threads(1)
    images, folder = map(Path, sys.argv[1:3])
    factor, steps = map(int, sys.argv[3:])
    train, _ = data(images)
    net, forward = model(), paced(folder, factor)
    optimizer = torch.optim.SGD(net.parameters(), LR, fused=True)
    for step in range(steps):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        batch = {name: values[rows] for name, values in train.items()}
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(forward(net, batch), batch["y"]).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
