"""The least a torch loop can do: batches cut beforehand, in the same order every time."""

from __future__ import annotations

from itertools import cycle

import torch

from .clock import Clock
from .work import LOG_EVERY, Work, loss_after, optimizer


def train(work: Work, clock: Clock) -> float:
    model = work.model().train()
    optim = optimizer(model)
    cut = torch.split(work.x, work.batch_size), torch.split(work.y, work.batch_size)
    batches = list(zip(*cut, strict=True))
    log = []
    for step, (x, y) in enumerate(cycle(batches)):
        optim.zero_grad(set_to_none=True)
        loss = work.loss(model(x), y)
        loss.backward()
        optim.step()
        if step % LOG_EVERY == 0:
            log.append(loss.item())
        if clock.tick():
            break
    return loss_after(work, model)
