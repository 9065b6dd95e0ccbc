"""The values that pass between the parts, in the words of the design."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from echelon.core.config.optim import ClipSection, OptimizerSection
from echelon.core.config.parallel import (
    PipelineSection,
    ShardedSection,
    SyncSection,
    TensorSection,
)
from echelon.core.config.server import ParameterServerSection

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
    shares: tuple[float, ...] = ()
    """Each member's part of a batch, where they are not equal."""


class Stats(NamedTuple):
    """What one `compute` saw. A loss is a (sum, weight) pair, never a mean."""

    loss_sum: Tensor
    weight: float
    metrics: Mapping[str, Tensor]


class Ask(IntEnum):
    """What a member wants all to do after the same update.

    Members' wishes are added up with the gradients: each kind has room for 4,095 members in a
    number that a float64 holds exactly.
    """

    NOTHING = 0
    TIME = 1
    """Stop: the time is over."""
    BALANCE = 1 << 12
    """Divide batches anew: this member is slower than the others."""
    REGROUP = 1 << 24
    """Meet again: somebody wants to join."""
    SIGNAL = 1 << 36
    """Stop: this member got a signal."""
    MEET = 1 << 48
    """Come together: something is due that all do at the same version. Only a server asks for
    it, so there is no need for more room."""

    def among(self, asked: int) -> bool:
        """Whether anybody asked for this."""
        return bool(asked // self % 4096)


class Update(NamedTuple):
    """What one `update` did. If it is not committed, its lease goes back and `reason` says why.

    Loss, weight and `asked` are sums over all members.
    """

    committed: bool
    version: int
    loss_sum: float = 0.0
    weight: float = 0.0
    asked: int = 0
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
    micro: int = 1
    """Micro-batches of a whole update."""
    batch: int | None = None
    """Samples of a whole update, if that is known beforehand."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the members of a run are arranged, and what their strategy wants to know."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    """Members along each axis, the outermost first: `data`, then the strategy's own."""
    sync: SyncSection = field(default_factory=SyncSection)
    sharded: ShardedSection = field(default_factory=ShardedSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    tensor: TensorSection = field(default_factory=TensorSection)
    servers: ParameterServerSection = field(default_factory=ParameterServerSection)
    plan: Mapping[str, Any] = field(default_factory=dict)
    """What servers have to know of the job beside, as plain data: its schedule, its length, …"""
    balance: bool = True
    """Whether parts of a batch follow the members' speeds, where members come and go."""
