"""A small model with all that is hard to lay out flat, its servers' part, and its training in one
process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.comm.ps.layout import Layout, Partition
from echelon.core.config import OptimizerSection
from echelon.optim import Stepper, build_optimizer
from echelon.optim.build import penalised
from echelon.server.weights import Flats


class Odd(nn.Module):
    """Odd sizes, a convolution that lies channels last, a frozen and a single-valued parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.wide = nn.Linear(37, 53)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def partition_of(model: nn.Module, section: OptimizerSection, shards: int) -> Partition:
    named = trained(model)
    flags = penalised(section, named.values())
    return Partition(Layout.of(list(named), list(named.values()), flags), shards)


def gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn_like(p) for name, p in trained(model).items()}


def staged(partition: Partition, named: dict[str, Tensor]) -> list[list[Tensor]]:
    """Return gradients as trainers stage them: per shard and range."""
    flats = partition.layout.empty()
    for slot, place in zip(partition.layout.slots, partition.layout.views(flats), strict=True):
        if slot.name in named:
            place.copy_(named[slot.name])
    return [
        [held.clone() for held in partition.cut(shard, flats)] for shard in range(partition.shards)
    ]


class OneProcess:
    """Training in one process, whose result the servers have to reach."""

    def __init__(self, section: OptimizerSection, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(1)
        self.model = Odd().to(dtype)
        self.stepper = Stepper(
            build_optimizer(section, self.model), list(self.model.named_parameters())
        )

    def step(self, grads: dict[str, Tensor], factor: float) -> None:
        for name, parameter in trained(self.model).items():
            parameter.grad = grads[name].clone() if name in grads else None
        self.stepper.step(factor)

    def state(self) -> dict[str, object]:
        return {"model": dict(self.model.state_dict()), "optimizer": self.stepper.state_dict()}


def flats_of(partition: Partition, section: OptimizerSection, chunk: int = 256) -> list[Flats]:
    return [Flats(partition, shard, section, chunk=chunk) for shard in range(partition.shards)]
