"""Echelon as a user calls it: recording, ledger, gradient health and progress are on."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import echelon
from echelon.core.interfaces import Observer

from .clock import Clock
from .work import DECAY, LOG_EVERY, LR, SEED, Work, loss_after


def train(
    work: Work, clock: Clock, *, observers: Sequence[Observer] = (), **settings: Any
) -> float:
    def forward(model: nn.Module, batch: Any) -> Any:
        clock.tick()
        return model(batch["x"])

    task = echelon.Task(
        model=work.model,
        loss=echelon.cross_entropy,
        train={"x": work.x, "y": work.y},
        forward=forward,
        name=work.name,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = echelon.train(
            task,
            batch_size=work.batch_size,
            steps=clock.total,
            optimizer={"name": "adamw", "lr": LR, "weight_decay": DECAY, "decay": "all"},
            threads=torch.get_num_threads(),
            seed=SEED,
            track={"folder": folder, "every": LOG_EVERY, "report": False},
            checkpoint={"every": "never"},
            evaluate={"every": "never"},
            observers=observers,
            **settings,
        )
    return loss_after(work, result.model)
