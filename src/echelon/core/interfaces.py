"""The interfaces between packages, and `Task`, the part of a job that its user supplies.

    Task ──────────────▶ Strategy ◀────────────── Comm
    model, loss, data    how members compute      how a member reaches the others
                         and update together
                              ▲
                     the loop calls compute and update; Observers watch

The loop is written against `Strategy` and `Comm` alone. A strategy implements `Strategy`, or
`RemoteStrategy` if parameter servers hold the weights. The small protocols at each end are what
tasks (`BatchSource`, `Metric`, `Draws`) and strategies (`Schedule`, `Inspector`, `RowStore`) are
made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from echelon.core.types import Batch, Lease, Shard, Stats, Update

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from echelon.core.errors import PeerError


# What a user supplies: the task, and the parts that it is made of


Loss: TypeAlias = "Callable[[Any, Batch], tuple[Tensor, Tensor | float]]"
"""(model output, batch) → (sum, weight)."""
Augment: TypeAlias = "Callable[[Batch, Draws], Batch]"
OptimizerFactory: TypeAlias = "Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]"


def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call the model with the column `x`: the default of `Task.forward`."""
    return model(batch["x"])


@dataclass(slots=True)
class Task:
    """Model, loss, optimizer, data and metrics of one job.

    `model` and `optimizer` are best given as factories: a strategy may shard the model before
    the optimizer sees it, or build both on another machine. An `nn.Module` is accepted too.

    `train` and `valid` may be a `BatchSource`, any torch `Dataset`, a mapping of tensors or
    arrays (column → values), or the path of a folder of shards.

    `loss` maps (model output, batch) to a (sum, weight) pair; `forward` says how the model is
    called, and defaults to `model(batch["x"])`. A metric is a `Metric`, or a function like
    `loss` whose sums are divided at the end.

    `decode` turns a batch of outputs into plain data for `echelon predict`; `samples` returns a
    few outputs of the trained model to show in the report. `fitted` holds everything that was
    fitted to the training data besides the weights (vocabulary, label names, …): plain data,
    stored with the run.
    """

    model: nn.Module | Callable[[], nn.Module]
    loss: Loss
    train: Any = None
    valid: Any = None
    optimizer: OptimizerFactory | None = None
    metrics: Mapping[str, Metric | Loss] = field(default_factory=dict)
    forward: Callable[[nn.Module, Batch], Any] = call_model
    augment: Augment | None = None
    decode: Callable[[Any], list[Any]] | None = None
    samples: Callable[[nn.Module], list[dict[str, str]]] | None = None
    labels: tuple[str, ...] = ()
    name: str = "task"
    about: Mapping[str, Any] = field(default_factory=dict)
    fitted: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class BatchSource(Protocol):
    """Samples that can be gathered by row number, many at a time and in any order."""

    def __len__(self) -> int: ...

    def gather(self, rows: Tensor) -> Batch:
        """Return the samples at these row numbers (int64), in this order."""
        ...


@runtime_checkable
class Metric(Protocol):
    """A number computed from sums: totals of batches and of members can simply be added."""

    def measure(self, output: Any, batch: Batch) -> Tensor:
        """Return the contribution of this batch to the total; always of the same shape."""
        ...

    def value(self, total: Tensor) -> float: ...


class Draws(Protocol):
    """Random numbers that belong to samples: every worker draws the same numbers for a sample."""

    def uniform(self, draw: int) -> Tensor:
        """Return a number in [0, 1) per sample, a function of (seed, epoch, position, draw)."""
        ...


# How members compute and update: the strategy, and the parts that it works with


class Strategy(Protocol):
    """One way to compute updates together. Each implementation passes the suite in tests/contract/.

    One update is a `compute` over this member's share of the batch, then `update`. The methods
    from `rejoin` on serve runs whose members change, and checkpoints.
    """

    shard: Shard
    model: nn.Module
    whole: bool
    """Whether `model` is complete, so that this member can call it without the others."""
    alone: bool
    """Whether this member can make a complete `state_dict` without the others."""
    remote: bool
    """Whether servers hold weights and optimizer, and this is a `RemoteStrategy`."""
    apart: bool
    """Whether members make updates independently of each other and synchronize only at times."""

    def setup(self, task: Task, comm: Comm) -> None:
        """Build model and optimizer from the task's factories."""
        ...

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        """Run forward and, unless evaluating, backward over all of `micro`, summing gradients."""
        ...

    def update(self, lease: Lease | None = None) -> Update:
        """Make one update of the gradients, computed on the samples of `lease`.

        The optimizer runs here or on servers.
        """
        ...

    def total(self, stats: Stats) -> Stats:
        """Sum stats over all members, so that each sample counts once."""
        ...

    def observe(self, value: float) -> None:
        """Pass a validation result to the schedule (smaller is better). All members call it."""
        ...

    def rate(self) -> float:
        """Return the learning rate of the last update."""
        ...

    def size(self) -> int:
        """Return the number of parameters of the complete model, over all members."""
        ...

    def remarks(self) -> Sequence[str]:
        """Return notes for the user on how this model will be trained, one line each."""
        ...

    def rejoin(self) -> None:
        """Abandon the work under way and join the members of the new generation."""
        ...

    def held(self) -> tuple[int, int] | None:
        """Return (part, parts) of the state that this member holds; None if it is not divided."""
        ...

    def lend(self, holders: Any) -> None:
        """From now on gather `state_dict` over `holders`, a collective of those with all parts."""
        ...

    def balance(self) -> Sequence[float]:
        """Divide batches by the members' speeds; return the shares. All members call it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return complete tensors by name, even if this member holds only parts of them.

        All members call it together; only the result of member 0 is sure to be complete.
        """
        ...

    def healing(self) -> dict[str, Any]:
        """Return the state that an outdated member has to load and cannot get from servers."""
        ...

    def settle(self) -> bool:
        """Abandon an interrupted update; return whether the state is still that of one version."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def let_go(self) -> None:
        """Remove all hooks from the model, so that another strategy can take it over."""
        ...

    def close(self) -> None: ...


class RemoteStrategy(Strategy, Protocol):
    """A strategy whose weights and optimizer live on servers.

    The servers also keep the ledger of the samples that they have applied.
    """

    lacks_state: bool
    """Whether the servers have lost their state, or part of it, and a member must load it."""
    share: int
    """Samples in this member's next update if it makes updates alone; 0: as the job says."""
    pace: float | None
    """Seconds per sample; None if not measured yet."""
    foresees: bool
    """Whether `expect` has any effect."""

    def expect(self, micro: Sequence[Batch]) -> None:
        """Announce the batches after the next ones. Results do not depend on this call."""
        ...

    def spool(self, folder: Path) -> None:
        """Let `state_dict` put parts that are too large for memory into files in this folder."""
        ...

    def pull(self) -> int:
        """Fetch the servers' weights without starting an update; return their version."""
        ...

    def rest(self) -> None:
        """Announce that this member makes no updates for now; servers do not wait for it."""
        ...

    def leave_out(self, lease: Lease) -> None:
        """Mark these samples as done without an update."""
        ...

    def consumed(self) -> dict[str, Any]:
        """Return the servers' ledger."""
        ...

    def unheard(self, version: int) -> Sequence[Sequence[int]]:
        """Return servers' commits after `version`: (epoch, start, stop, version, member) each."""
        ...

    def figures(self) -> dict[str, float]:
        """Return metrics of this member and the servers: staleness, bytes, seconds waited, …"""
        ...


class Schedule(Protocol):
    """The learning rate over the course of a run, as a factor of the optimizer's own rate."""

    def factor(self, version: int) -> float: ...

    def observe(self, value: float) -> None:
        """Take a validation result into account (smaller is better)."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Inspector(Protocol):
    """A check of weights and gradients, made at some versions just before the update."""

    def due(self, version: int) -> bool: ...

    def inspect(
        self, version: int, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> None: ...


class RowStore(Protocol):
    """The storage of one embedding table. Ids are any int64 numbers, distinct in each call."""

    remote: bool
    """Whether the rows lie in another process; the model's state is then without them."""

    def pull(self, ids: Tensor) -> Tensor:
        """Return the row of each id, [n, width], valid until the next pull. Creates no rows."""
        ...

    def expect(self, ids: Tensor) -> None:
        """Announce that these ids will be pulled soon. Results do not depend on this call."""
        ...

    def push(
        self,
        ids: Tensor,
        gradients: Tensor,
        counts: Tensor | None = None,
        *,
        factor: float = 1.0,
        version: int | None = None,
    ) -> None:
        """Apply update `version` to these rows. Overwrites `gradients`."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Return all rows and the state kept with each, valid until the next push."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...


# How a member reaches the others


class Comm(Protocol):
    """One member's connection to the other members of its generation, and to the coordinator.

    Where members never change there is no coordinator: reports go nowhere, and `regroup` raises
    the error with which a member was lost.
    """

    index: int
    count: int
    asked: int
    """This member's requests for all members, carried out after the current update (see `Ask`)."""
    pulse: Callable[[int, str], None]
    """Reports (step, activity) of this member to the process that supervises it."""
    watched: bool
    """Whether another process reports why this member lost a peer."""
    elastic: bool
    """Whether the remaining members can form a new generation when one is lost."""
    met: bool
    """Whether this member is in a generation, not between two."""
    tell: Callable[[str], None]
    """Called from any thread with a message for the user, such as which member is awaited."""

    def regroup(self, progress: Sequence[int], lost: PeerError | None) -> Healing:
        """Form a new generation; comparing `progress` shows which members are outdated."""
        ...

    def report(self, records: Sequence[Sequence[int]]) -> None:
        """Report commits, each as [epoch, start, stop, first version, last version]."""
        ...

    def alone(self) -> None:
        """Leave the other members until the next `regroup`; operations under way are void."""
        ...

    def on_record(self, version: int) -> bool | None:
        """Return whether the journal has all updates up to this version; None: not yet."""
        ...

    def rolled_back(self, version: int, why: str) -> None:
        """Report that the run went back to this version: later updates are void."""
        ...

    def divided(self, version: int, shares: Sequence[float]) -> None:
        """Report each member's share of a batch from this version on."""
        ...

    def close(self) -> None: ...


class Healing(NamedTuple):
    """This member's part in bringing outdated members up to date after `Comm.regroup`.

    Most members have no part in it, and `peers` is None.
    """

    peers: Sending | None = None
    """The most advanced member and all outdated ones; member 0 of it sends its state."""
    sends: bool = False
    """Whether this member is the most advanced one, and sends."""
    anew: bool = False
    """Whether no member has the run's state, so that this one must load the last checkpoint."""
    recorded: int = 0
    """The last version in the journal."""


class Sending(Protocol):
    """A group of members in which one member sends tensors to the rest."""

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...


# Who watches a run


class Observer(Protocol):
    """Receives the events of a run. It never changes training, and its failure never stops it."""

    def started(self, run: str, facts: Mapping[str, Any]) -> None: ...

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """Called a few times a second with the current epoch, samples, loss, lr and rates."""
        ...

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Called every `track.every` steps with the metrics to record."""
        ...

    def evaluated(self, step: int, values: Mapping[str, float]) -> None: ...

    def noticed(self, step: int, message: str) -> None:
        """Called with a message for the user: a health warning, a failure, a recovery."""
        ...

    def finished(self, status: str, summary: Mapping[str, Any]) -> None: ...
