"""DDP as torchrun starts it again after a failure: every process anew, from the last checkpoint.

torchrun --max-restarts=… -m peers.restarting STAMPS CHECKPOINT
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import fault_work


def main() -> None:
    """Until it is ended."""
    stamps, checkpoint = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = fault_work.model()
    optimizer = fault_work.optimizer(model.parameters(), stamps)
    first = _resumed(checkpoint, model, optimizer)
    replica = DistributedDataParallel(model)
    x, y = fault_work.data()
    for step in itertools.count(first):
        mine = _part(step)
        optimizer.zero_grad(set_to_none=True)
        fault_work.loss(replica(x[mine]), y[mine]).backward()
        optimizer.step()
        if (step + 1) % fault_work.SAVE_EVERY == 0 and dist.get_rank() == 0:
            _save(checkpoint, step + 1, model, optimizer)


def _part(step: int) -> torch.Tensor:
    """This rank's part of the batch."""
    first = step * fault_work.BATCH % fault_work.SAMPLES
    rows = torch.arange(first, first + fault_work.BATCH)
    return rows.tensor_split(dist.get_world_size())[dist.get_rank()]


def _resumed(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    held: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    return int(held["step"])


def _save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    aside = path.with_suffix(".aside")
    held = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(held, aside)
    aside.replace(path)


if __name__ == "__main__":
    main()
