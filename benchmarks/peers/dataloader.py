"""The loop most people write: a `DataLoader` over a `Dataset`, and a line every 50 steps."""

from __future__ import annotations

from itertools import count

from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from .clock import Clock
from .work import LOG_EVERY, Work, loss_after, optimizer


def loader(work: Work) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled every epoch, the smaller last batch included. Lightning and Accelerate use it."""
    return DataLoader(TensorDataset(work.x, work.y), batch_size=work.batch_size, shuffle=True)


def train(work: Work, clock: Clock) -> float:
    model = work.model().train()
    optim = optimizer(model)
    batches = loader(work)
    for epoch in count():
        for step, (x, y) in enumerate(batches):
            optim.zero_grad()
            loss = work.loss(model(x), y)
            loss.backward()
            optim.step()
            if step % LOG_EVERY == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            if clock.tick():
                return loss_after(work, model)
    raise AssertionError("epochs never end")
