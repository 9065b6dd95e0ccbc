"""DDP by hand: batches cut beforehand, each rank's half of them, and as little else as can be."""

from __future__ import annotations

from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .clock import Clock
from .work import LOG_EVERY, Work, loss_after, optimizer


def train(
    work: Work, clock: Clock, *, bucket_view: bool = False, channels_last: bool = False
) -> float:
    """`work.batch_size` is that of all ranks together."""
    dist.init_process_group("gloo")
    model = work.model().train()
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optim = optimizer(model)
    replica = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    batches = list(zip(_mine(work.x, work), _mine(work.y, work), strict=True))
    log = []
    for step, (x, y) in enumerate(cycle(batches)):
        optim.zero_grad(set_to_none=True)
        loss = work.loss(replica(x), y)
        loss.backward()
        optim.step()
        if step % LOG_EVERY == 0:
            log.append(loss.item())
        if clock.tick():
            break
    return loss_after(work, model)


def _mine(values: Tensor, work: Work) -> list[Tensor]:
    rank, count = dist.get_rank(), dist.get_world_size()
    return [batch.tensor_split(count)[rank] for batch in values.split(work.batch_size)]
