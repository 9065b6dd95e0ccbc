"""The values that pass between the parts, in the words of the design."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from echelon.core.config.optim import ClipSection, OptimizerSection

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Sparse(NamedTuple):
    """Rows of a CSR matrix: row i holds `indices[offsets[i]:offsets[i + 1]]`.

    This is what `torch.nn.functional.embedding_bag` takes, so a linear layer over sparse rows
    needs no dense copy of them.
    """

    indices: Tensor
    values: Tensor
    offsets: Tensor
    width: int


Column: TypeAlias = "Tensor | Sparse"
Batch: TypeAlias = "dict[str, Column]"
"""Column name → values. The first dimension is the sample."""


class Lease(NamedTuple):
    """A half-open range of an epoch's order, handed out to be committed or returned."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a batch is mine."""

    index: int = 0
    count: int = 1


class Stats(NamedTuple):
    """What one `compute` saw. A loss is a (sum, weight) pair, never a mean."""

    loss_sum: Tensor
    weight: float
    metrics: Mapping[str, Tensor]


class Update(NamedTuple):
    """What one `update` did. If it is not committed, its lease goes back and `reason` says why."""

    committed: bool
    version: int
    staleness: int = 0
    peers: int = 1
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a strategy computes; the loop knows nothing of it."""

    device: torch.device
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    clip: ClipSection = field(default_factory=ClipSection)
    precision: str = "fp32"
    recompute: bool = False
    compile: bool = False
