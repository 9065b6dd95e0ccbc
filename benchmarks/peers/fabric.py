"""Fabric as its guide has it: a loop of one's own, and Lightning's set-up of processes."""

from __future__ import annotations

from itertools import count
from typing import Any

import lightning

from .clock import Clock
from .dataloader import loader
from .work import LOG_EVERY, Work, loss_after, optimizer


def train(work: Work, clock: Clock, devices: int) -> float:
    fabric: Any = lightning.Fabric(accelerator="cpu", devices=devices, strategy="ddp")
    fabric.launch()
    bare = work.model()
    model, optim = fabric.setup(bare, optimizer(bare))
    batches = fabric.setup_dataloaders(loader(work))
    model.train()
    for epoch in count():
        for step, (x, y) in enumerate(batches):
            optim.zero_grad()
            loss = work.loss(model(x), y)
            fabric.backward(loss)
            optim.step()
            if step % LOG_EVERY == 0:
                fabric.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            if clock.tick():
                return loss_after(work, bare)
    raise AssertionError("epochs never end")
