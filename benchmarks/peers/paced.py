"""A model that takes a fixed time per sample, as on a device of its own: members of known speed.

Four members cannot each have their own speed on two cores: what they compute they take from each
other. So the time of a sample is waited, a third of it in forward and the rest in backward, as if
an accelerator computed; everything else is real, and the same for all sides.

torchrun … -m peers.paced FOLDER STEPS BATCH FACTOR      DDP by hand; alone, where it is one process
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from .stamps import StampedAdamW
from .work import LR, SEED

SECONDS = 0.001
"""Per sample, for all but one."""
SLOWER = 4
"""The factor of that one."""
WIDTH, SAMPLES = 64, 8192


class Device(nn.Module):
    """An mlp that takes its time."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.seconds = SECONDS * factor
        self.layers = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Waiting.apply(self.layers(x), len(x) * self.seconds)  # type: ignore[no-untyped-call]
        return out


class Waiting(torch.autograd.Function):
    """Takes this long, a third of it forwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return grads[0], None


def factor_here(folder: Path) -> int:
    """The first process that asks is the slow one."""
    try:
        os.close(os.open(folder / "slow", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return 1
    return SLOWER


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(SEED)
    x = torch.randn(SAMPLES, WIDTH, generator=draw)
    return x, x[:, :10].argmax(1)


def main() -> None:
    folder = Path(sys.argv[1])
    steps, batch, factor = map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    model = Device(factor or factor_here(folder))
    replica = DistributedDataParallel(model)
    optimizer = StampedAdamW(model.parameters(), folder / "stamps", LR)
    x, y = data()
    for step in range(steps):
        first = step * batch % (SAMPLES - batch)
        mine = torch.arange(first, first + batch).tensor_split(count)[rank]
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(replica(x[mine]), y[mine]).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
