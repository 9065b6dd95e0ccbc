"""Lightning as its first example has it: logger, logging and progress bar on, as by default.

Checkpoints are off, as they are for every other side.
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from torch import Tensor

from .clock import Clock
from .dataloader import loader
from .work import Work, loss_after, optimizer


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The work in Lightning's form."""

    def __init__(self, work: Work, clock: Clock) -> None:
        super().__init__()
        self.work = work
        self.clock = clock
        self.model = work.model()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        # Here and not in a callback: one more callback would cost Lightning time of its own.
        self.clock.tick()
        x, y = batch
        loss = self.work.loss(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self.model)


def train(work: Work, clock: Clock, devices: int = 1) -> float:
    module = Module(work, clock)
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = lightning.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy="ddp" if devices > 1 else "auto",
            max_steps=clock.total,
            max_epochs=-1,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader(work))
    return loss_after(work, module.model)
