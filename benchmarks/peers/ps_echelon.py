"""Echelon's parameter server as a user calls it: recording, ledger, gradient health, progress."""

from __future__ import annotations

from typing import Any

from torch import nn

import echelon

from .ps_job import BATCH, LR, TRAINERS, Finding, Job, Ticks
from .work import LOG_EVERY, SEED, loss_after


def train(job: Job, plane: str, weights: str = "pinned") -> Finding:
    work, ticks = job.work(), Ticks(job.ticks)

    def forward(model: nn.Module, batch: Any) -> Any:
        ticks.tick()
        return model(batch["x"])

    task = echelon.Task(
        model=work.model,
        loss=echelon.cross_entropy,
        train={"x": work.x, "y": work.y},
        forward=forward,
        name=work.name,
    )
    result = echelon.train(
        task,
        strategy="parameter_server",
        workers=TRAINERS,
        parameter_server={"staleness": None, "plane": plane, "weights": weights},
        batch_size=BATCH,
        steps=TRAINERS * job.total,
        optimizer={"name": "sgd", "lr": LR},
        elastic={"balance": False},  # every step has the same samples, as with the others
        threads=1,
        seed=SEED,
        track={"folder": str(job.folder / "runs"), "every": LOG_EVERY, "report": False},
        checkpoint={"every": "never"},
        evaluate={"every": "never"},
    )
    return Finding(job.rate(), loss_after(work, result.model))
