"""Weights after 20 steps of every strategy with every optimizer, by two workers."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor

from echelon.core.config import ClipSection, OptimizerSection, PipelineSection
from echelon.core.config.sections import OptimizerName, ShardedSection
from echelon.core.types import Parallel
from tests.contract import members, networks, serving, trained
from tests.contract.jobs import strategy

from .numerics import digest, tensor_bytes

STRATEGIES: dict[str, tuple[str, Parallel]] = {
    "single": ("single", Parallel()),
    "all_reduce": ("all_reduce", Parallel()),
    "sharded optimizer": ("sharded", Parallel(sharded=ShardedSection(level="optimizer"))),
    "sharded gradients": ("sharded", Parallel(sharded=ShardedSection(level="gradients"))),
    "sharded parameters": ("sharded", Parallel(sharded=ShardedSection(level="parameters"))),
    "tensor": ("tensor", Parallel()),
    # The measured split depends on timing.
    "pipeline": ("pipeline", Parallel(pipeline=PipelineSection(split=("1",)))),
    "parameter_server": ("parameter_server", Parallel()),
}
OPTIMIZERS = {
    name: OptimizerSection(
        name=name,
        lr=0.05 if name in ("sgd", "momentum", "nesterov") else 0.005,
        l2=1e-3,
        weight_decay=0.01,
    )
    for name in get_args(OptimizerName)
}
CASES = [
    *(("mlp", optimizer, ClipSection(norm=0.5)) for optimizer in OPTIMIZERS),
    ("gpt", "momentum", ClipSection()),
]


def train(name: str) -> dict[str, dict[str, Any]]:
    """Train every case under one strategy; describe the final weights of each."""
    kind, parallel = STRATEGIES[name]

    def one(case: tuple[str, str, ClipSection], comm: Any) -> dict[str, Any]:
        network, optimizer, clip = case
        built = strategy(
            kind,
            networks.task(network),
            optimizer=OPTIMIZERS[optimizer],
            clip=clip,
            comm=comm,
            parallel=parallel,
        )
        for batch in networks.batches(network):
            shard = built.shard
            built.compute(networks.part(batch, shard.index, shard.count))
            assert built.update().committed
        return described(trained.weights(built))

    def work(comm: Any) -> dict[str, dict[str, Any]]:
        found = {}
        for case in CASES:
            if kind == "parameter_server":
                comm.next()
            found[" ".join(case[:2])] = one(case, comm)
        return found

    if kind == "single":
        return work(None)
    if kind == "parameter_server":
        return serving.run(2, 2, work, times=len(CASES))  # type: ignore[no-any-return]
    return members.run(2, work)  # type: ignore[no-any-return]


def described(weights: dict[str, Tensor]) -> dict[str, Any]:
    """A hash of the bits, and the length and one projection of all weights as a vector."""
    if not weights:  # only worker 0 has complete weights
        return {}
    ordered = sorted(weights.items())
    flat = torch.cat([value.double().flatten() for _, value in ordered])
    direction = torch.randn(len(flat), generator=torch.Generator().manual_seed(5)).double()
    return {
        "sha256": digest(part for key, v in ordered for part in (key.encode(), tensor_bytes(v))),
        "norm": float(flat.norm()),
        "projection": float(flat @ direction),
    }


def agree(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether two descriptions are of the same weights up to rounding."""
    near = 1e-5 * expected["norm"]
    return all(
        math.isclose(found[key], expected[key], rel_tol=0, abs_tol=near)
        for key in ("norm", "projection")
    )
