"""Accelerate as its guide has it: prepare, `accelerator.backward`, a line every 50 steps."""

from __future__ import annotations

from itertools import count

import accelerate

from .clock import Clock
from .dataloader import loader
from .work import LOG_EVERY, Work, loss_after, optimizer


def train(work: Work, clock: Clock) -> float:
    accelerator = accelerate.Accelerator(cpu=True)
    bare = work.model()
    model, optim, batches = accelerator.prepare(bare, optimizer(bare), loader(work))
    model.train()
    for epoch in count():
        for step, (x, y) in enumerate(batches):
            optim.zero_grad()
            loss = work.loss(model(x), y)
            accelerator.backward(loss)
            optim.step()
            if step % LOG_EVERY == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            if clock.tick():
                return loss_after(work, accelerator.unwrap_model(model))
    raise AssertionError("epochs never end")
