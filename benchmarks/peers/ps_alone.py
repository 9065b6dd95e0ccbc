"""The ceiling: trainers that synchronise with nobody, each with its own model and its own SGD."""

from __future__ import annotations

import torch
from torch.multiprocessing.spawn import spawn

from .ps_job import LR, TRAINERS, Finding, Job, Ticks
from .work import loss_after


def train(job: Job) -> Finding:
    spawn(_trainer, (job,), TRAINERS)
    losses = [float(path.read_text()) for path in job.folder.glob("loss-*")]
    assert len(losses) == TRAINERS, losses
    return Finding(job.rate(), max(losses))


def _trainer(number: int, job: Job) -> None:
    torch.set_num_threads(1)
    work = job.work()
    model = work.model().train()
    optimizer = torch.optim.SGD(model.parameters(), LR, fused=True)
    ticks, batches = Ticks(job.ticks), job.batches(number)
    job.meet(number)
    for x, y in batches:
        ticks.tick()
        optimizer.zero_grad(set_to_none=True)
        work.loss(model(x), y).backward()
        optimizer.step()
    (job.folder / f"loss-{number}").write_text(str(loss_after(work, model)))
