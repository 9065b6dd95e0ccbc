"""Pipelines of the networks that every strategy has to train like one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from echelon.comm.group import Group
from echelon.core.config import OptimizerSection, PipelineSection, SyncSection
from echelon.core.interfaces import Strategy, Task
from echelon.core.types import Batch, Parallel
from echelon.task import prepare
from echelon.task.metrics import Accuracy, Confusion

from . import networks
from .jobs import strategy

MOMENTUM = OptimizerSection(name="momentum", lr=0.05)
ADAM = OptimizerSection(name="adam", lr=1e-2)


def task(name: str) -> Task:
    """One of the networks, with samples to try its layers on."""
    chosen = networks.task(name)
    chosen.train = networks.data(name)
    chosen.metrics = {"accuracy": Accuracy(), "classes": Confusion(3)}
    if name.startswith("gpt"):
        chosen.metrics = {"accuracy": Accuracy()}
    return prepare(chosen)


def batches(name: str, count: int = 20) -> list[Batch]:
    return networks.batches(name, count=count)


def copied(built: Strategy) -> dict[str, Tensor]:
    found = built.state_dict()["model"]
    return {name: value.clone() for name, value in found.items()}


def piped(
    group: Group,
    chosen: Task,
    schedule: str = "1f1b",
    *,
    data: int = 1,
    split: tuple[str, ...] = (),
    sync: SyncSection | None = None,
    **settings: Any,
) -> Strategy:
    parallel = Parallel(
        mesh={"data": data, "pipeline": group.count // data},
        pipeline=PipelineSection(schedule=schedule, split=split),
        sync=sync or SyncSection(),
    )
    return strategy("pipeline", chosen, parallel=parallel, comm=group, **settings)


def steps(built: Strategy, found: Sequence[Batch], accumulate: int = 1) -> None:
    for batch in found:
        built.compute(networks.part(batch, built.shard.index, built.shard.count, accumulate))
        assert built.update().committed
