"""Trainers whose weights live on servers end where one process ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from echelon.core.config import (
    ClipSection,
    OptimizerSection,
    ScheduleSection,
)

from . import networks, trained
from .jobs import difference, strategy
from .serving import Served, run

pytestmark = pytest.mark.timeout(300)

OPTIMIZERS = {
    "sgd": OptimizerSection(name="sgd", lr=0.1, l2=1e-3),
    "momentum": OptimizerSection(name="momentum", lr=0.05, weight_decay=0.1),
    "nesterov": OptimizerSection(name="nesterov", lr=0.05),
    "adagrad": OptimizerSection(name="adagrad", lr=1e-2, eps=1e-5),
    "rmsprop": OptimizerSection(name="rmsprop", lr=1e-3, momentum=0.5, eps=1e-4),
    "adam": OptimizerSection(name="adam", lr=1e-2, eps=1e-5),
    "adamw": OptimizerSection(name="adamw", lr=1e-2, eps=1e-5, weight_decay=0.1, l1=1e-3),
}
CLIPS = (ClipSection(), ClipSection(norm=0.05), ClipSection(value=0.01))
CASES = [
    (network, optimizer, CLIPS[at % 3], 1 + at % 2, ("constant", "cosine")[at % 2])
    for at, (network, optimizer) in enumerate(
        (network, optimizer) for network in ("mlp", "gpt") for optimizer in OPTIMIZERS
    )
]


def train(case: tuple[Any, ...], comm: Served | None = None) -> dict[str, torch.Tensor]:
    network, optimizer, clip, micro, schedule = case
    built = strategy(
        "single" if comm is None else "parameter_server",
        networks.task(network),
        optimizer=OPTIMIZERS[optimizer],
        clip=clip,
        micro=micro,
        schedule=ScheduleSection(name=schedule),
        comm=comm,
    )
    index, count = (0, 1) if comm is None else (comm.index, comm.count)
    for batch in networks.batches(network):
        built.compute(networks.part(batch, index, count, micro))
        assert built.update().committed
    return trained.weights(built)


@pytest.mark.parametrize(("count", "servers"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_ends_on_the_weights_of_one_process(count: int, servers: int) -> None:
    alone = {case: train(case) for case in CASES}

    def work(group: Served) -> dict[str, float]:
        found = {}
        for case in CASES:
            group.next()
            found[str(case)] = difference(train(case, group), alone[case])
        return found

    found = run(count, servers, work, times=len(CASES))
    assert max(found.values()) <= 1e-5, found
