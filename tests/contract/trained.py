"""Training runs of the networks, alone and together, to be compared."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from echelon.comm.group import Group
from echelon.core.config import ClipSection, OptimizerSection
from echelon.core.interfaces import Task
from echelon.core.types import Parallel

from . import networks
from .jobs import strategy

MOMENTUM = OptimizerSection(name="momentum", lr=0.05)
# Of attention's key biases the gradient is exactly nothing but noise, which a small eps blows up.
ADAM = OptimizerSection(name="adam", lr=1e-2, eps=1e-5)
ADAMW = OptimizerSection(name="adamw", lr=1e-2, eps=1e-5, weight_decay=0.1, l1=1e-3)
ADAGRAD = OptimizerSection(name="adagrad", lr=1e-2)
CASES = {
    "plain": (MOMENTUM, ClipSection(), 1),
    "clipped by norm, accumulated": (MOMENTUM, ClipSection(norm=0.05), 3),
    "clipped by value": (ADAGRAD, ClipSection(value=0.01), 1),
    "adam, clipped, accumulated": (ADAM, ClipSection(norm=0.1), 2),
    "penalised": (ADAMW, ClipSection(norm=0.1), 1),
}
CASE = "adam, clipped, accumulated"


def built(
    name: str, task: Task, case: str, comm: Group | None = None, parallel: Parallel | None = None
) -> Any:
    """The strategy `name` among the members of `comm`, or one process alone."""
    optimizer, clip, micro = CASES[case]
    return strategy(
        "single" if comm is None else name,
        task,
        optimizer=optimizer,
        clip=clip,
        micro=micro,
        comm=comm,
        parallel=parallel,
    )


def go(trained: Any, name: str, case: str, which: slice) -> None:
    """Through these of the network's batches, as far as they are this member's."""
    shard = trained.shard
    for batch in networks.batches(name)[which]:
        trained.compute(networks.part(batch, shard.index, shard.count, CASES[case][2]))
        assert trained.update().committed


def weights(trained: Any) -> dict[str, Tensor]:
    """As they are saved; whole in the first member."""
    return {key: value.detach().clone() for key, value in trained.state_dict()["model"].items()}


@functools.cache
def alone(name: str, case: str) -> dict[str, Tensor]:
    """Where one process ends."""
    trained = built("single", networks.task(name), case)
    go(trained, name, case, slice(20))
    return weights(trained)
