"""Values passed between packages: Batch, Lease, Shard, Stats, Update, Request, TableSpec."""

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


# --- types ---
# The values that pass between the parts, in the words of the design.


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


# --- rows ---
# What a table of rows is: the part that trainers and servers have to agree on.

RuleName = Literal["sgd", "adagrad", "adam"]
_RULES: dict[str, RuleName] = {
    "sgd": "sgd",
    "adagrad": "adagrad",
    "adam": "adam",
    "adamw": "adam",
}
_EPS = {"sgd": 1e-8, "adagrad": 1e-10, "adam": 1e-8}
WIDEST = 1 << 16


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
        """The row-wise form of a job's optimizer."""
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


class RowSpec(Section):
    """A table whose rows are made when they are first seen."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,200}$")]
    width: Annotated[int, Field(ge=1, le=WIDEST)]
    """Numbers in a row."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    """A row's first values depend on this, on `name` and on its id, and on nothing else."""
    std: NonNegativeFloat = 0.05
    """Spread of the first values; 0 begins with zeros."""
    admit: PositiveInt = 1
    """A row is made when its id has been trained on this many times; it reads as zeros before."""
    expire: PositiveInt | None = None
    """A row is forgotten when its id was in none of this many updates."""
    rule: RowRule

    @model_validator(mode="after")
    def _in_bounds(self) -> Self:
        if self.admit >= 1 << 31:
            raise SettingError(f"admit = {self.admit}: must be below {1 << 31}", "admit")
        return self
