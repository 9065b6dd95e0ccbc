"""The values that packages pass to each other.

One step of training, in terms of these types:

    ledger grants a Lease ─▶ loader gathers its samples as Batches, this member's Shard of each
    ─▶ strategy.compute returns Stats (loss sum, weight) ─▶ strategy.update returns an Update

`Ask` travels with the gradients: it is how one member requests that all of them stop or meet after
the same update. `Numerics` and `Parallel` carry the parts of a job that a strategy needs.
`RowSpec` and `RowRule` describe an embedding table that is stored by row; trainers and parameter
servers have to agree on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from echelon.core.config.sections import (
    Beta,
    ClipSection,
    OptimizerSection,
    ParameterServerSection,
    PipelineSection,
    Section,
    SettingError,
    ShardedSection,
    SyncSection,
    TensorSection,
)
from echelon.core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Sparse(NamedTuple):
    """Rows of a CSR matrix: row i holds `indices[offsets[i]:offsets[i + 1]]`.

    `torch.nn.functional.embedding_bag` takes this layout, so a linear layer over sparse rows needs
    no dense copy of them.
    """

    indices: Tensor
    values: Tensor
    offsets: Tensor
    width: int


Column: TypeAlias = "Tensor | Sparse"
Batch: TypeAlias = "dict[str, Column]"
"""Column name → values. The first dimension is the sample."""


class Lease(NamedTuple):
    """A half-open range of an epoch's order, assigned to a member; later committed or returned."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of every batch that one member computes."""

    index: int = 0
    count: int = 1
    shares: tuple[float, ...] = ()
    """Fraction of a batch for each member; empty: all fractions are equal."""


class Stats(NamedTuple):
    """The result of one `compute`. A loss is a (sum, weight) pair, never a mean."""

    loss_sum: Tensor
    weight: float
    metrics: Mapping[str, Tensor]


class Update(NamedTuple):
    """The result of one `update`: the version it made, or the reason why it was not committed.

    The lease of an update that is not committed is returned. Loss, weight and `asked` (see `Ask`)
    are sums over all members.
    """

    committed: bool
    version: int
    loss_sum: float = 0.0
    weight: float = 0.0
    asked: int = 0
    staleness: int = 0
    peers: int = 1
    reason: str = ""


class Ask(IntEnum):
    """A request of one member that all members carry out after the same update.

    Requests are summed over the members together with the gradients. Each kind counts in 12 bits
    of its own, enough for 4,095 members, and a float64 holds the sum exactly.
    """

    NOTHING = 0
    TIME = 1
    """Stop: the time limit of the job has passed."""
    BALANCE = 1 << 12
    """Divide batches by speed again: this member is slower than the others."""
    REGROUP = 1 << 24
    """Form a new generation: a worker wants to join, or the coordinator requests it."""
    SIGNAL = 1 << 36
    """Stop: this member received a signal."""
    MEET = 1 << 48
    """Synchronize: something is due that all members do at the same version. Only a server makes
    this request, so the 5 bits that are left of a float64's 53 are enough."""

    def among(self, asked: int) -> bool:
        """Return whether `asked`, a sum of requests, contains at least one of this kind."""
        return bool(asked // self % 4096)


# What a strategy needs of a job


@dataclass(frozen=True, slots=True)
class Numerics:
    """How one member computes: device, optimizer, precision, … The loop never reads it."""

    device: torch.device
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    clip: ClipSection = field(default_factory=ClipSection)
    precision: str = "fp32"
    recompute: bool = False
    compile: bool = False
    micro: int = 1
    """Micro-batches per update."""
    batch: int | None = None
    """Samples per update over all members; None if the number is not known beforehand."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the members of a run are arranged, and the sections of the job for each strategy."""

    mesh: Mapping[str, int] = field(default_factory=dict)
    """Number of members along each axis, the outermost first: `data`, then the strategy's own."""
    sync: SyncSection = field(default_factory=SyncSection)
    sharded: ShardedSection = field(default_factory=ShardedSection)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    tensor: TensorSection = field(default_factory=TensorSection)
    servers: ParameterServerSection = field(default_factory=ParameterServerSection)
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the job that servers need besides their section, as plain data: its schedule,
    its length, …"""
    balance: bool = True
    """Whether an elastic run divides each batch by the members' speeds."""


# Embedding tables that are stored by row


RuleName = Literal["sgd", "adagrad", "adam"]


class RowRule(Section):
    """How a row learns. State is kept for each row, not for each number of it.

    Penalties act on a row when it is in a batch, and not while it is not.
    """

    name: RuleName
    lr: PositiveFloat
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    l1: NonNegativeFloat = 0.0
    l2: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.0

    @classmethod
    def of(cls, section: OptimizerSection, table: str) -> Self:
        """Return the row-wise form of a job's optimizer."""
        name = _RULES.get(section.name)
        if name is None:
            raise ConfigError(
                f"optimizer {section.name!r} has no form for the rows of table {table!r}: choose "
                f"one of {', '.join(_RULES)}, or give the table its own",
                ("optimizer", "name"),
            )
        return cls(
            name=name,
            lr=section.lr,
            betas=section.betas or (0.9, 0.999),
            eps=section.eps or _EPS[name],
            l1=section.l1,
            l2=section.l2,
            weight_decay=section.weight_decay,
        )


WIDEST = 1 << 16


class RowSpec(Section):
    """An embedding table whose rows are created when their ids are first trained on."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,200}$")]
    width: Annotated[int, Field(ge=1, le=WIDEST)]
    """Numbers in a row."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    """A row's first values are a function of this seed, `name` and the row's id, and of nothing
    else."""
    std: NonNegativeFloat = 0.05
    """Standard deviation of the first values; 0: rows start as zeros."""
    admit: PositiveInt = 1
    """Create a row once its id was trained on this many times; until then it reads as zeros."""
    expire: PositiveInt | None = None
    """Delete a row whose id was in none of the last `expire` updates."""
    rule: RowRule

    @model_validator(mode="after")
    def _in_bounds(self) -> Self:
        if self.admit >= 1 << 31:
            raise SettingError(f"admit = {self.admit}: must be below {1 << 31}", "admit")
        return self


_RULES: dict[str, RuleName] = {
    "sgd": "sgd",
    "adagrad": "adagrad",
    "adam": "adam",
    "adamw": "adam",
}
_EPS = {"sgd": 1e-8, "adagrad": 1e-10, "adam": 1e-8}
