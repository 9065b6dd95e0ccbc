"""Task and the protocols: Strategy, Elastic, ServerSession, Comm, Observer, RowTable, Schedule,
Metric."""

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


# --- protocols ---
# The interfaces everything else is written against.

Loss: TypeAlias = "Callable[[Any, Batch], tuple[Tensor, Tensor | float]]"
"""(model output, batch) → (sum, weight)."""


@runtime_checkable
class BatchSource(Protocol):
    """Samples that can be gathered many at a time, in any order."""

    def __len__(self) -> int: ...

    def gather(self, rows: Tensor) -> Batch:
        """The samples at these row numbers (int64), in this order."""
        ...


@runtime_checkable
class Metric(Protocol):
    """A figure computed from sums, so that batches and members only have to be added up."""

    def measure(self, output: Any, batch: Batch) -> Tensor:
        """What this batch adds to the total; always the same shape."""
        ...

    def value(self, total: Tensor) -> float: ...


class Draws(Protocol):
    """Random numbers that belong to samples, not to workers: the same wherever they are drawn."""

    def uniform(self, draw: int) -> Tensor:
        """One number in [0, 1) per sample, a pure function of (seed, epoch, position, draw)."""
        ...


Augment: TypeAlias = "Callable[[Batch, Draws], Batch]"


class Schedule(Protocol):
    """How the learning rate changes: a factor of the optimizer's own rate."""

    def factor(self, version: int) -> float: ...

    def observe(self, value: float) -> None:
        """Hear a validation result (smaller is better)."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RowStore(Protocol):
    """Where the rows of one table are kept. Ids are distinct int64 numbers, any of them."""

    remote: bool
    """Whether they are no part of this process's model: its state is without them."""

    def pull(self, ids: Tensor) -> Tensor:
        """The row of each id, [n, width], good until the next pull. Looking makes no rows."""
        ...

    def expect(self, ids: Tensor) -> None:
        """These will be pulled soon: what can be done for it now is. No result depends on it."""
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
        """The part of update `version` that is about these rows; uses up the gradients."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All rows and what is kept with them, good until the next push."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None: ...


class Inspector(Protocol):
    """Looks at gradients just before they are applied, every now and then."""

    def due(self, version: int) -> bool: ...

    def inspect(
        self, version: int, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]
    ) -> None: ...


class Sending(Protocol):
    """Members of which one sends tensors to all others."""

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None: ...


class Healing(NamedTuple):
    """This member's part in bringing those up to date who are behind; mostly none."""

    peers: Sending | None = None
    """Whoever is ahead, and those who are behind."""
    sends: bool = False
    """Whether this member is the one who is ahead."""
    anew: bool = False
    """Whether nobody has the run's state: this member has to begin where a checkpoint ends."""
    recorded: int = 0
    """The last version on record."""


class Comm(Protocol):
    """How this member reaches the others."""

    index: int
    count: int
    asked: int
    """What this member wants all to do after the current update (bits of `Ask`)."""
    pulse: Callable[[int, str], None]
    """(step, doing): where this member is, for whoever watches over it."""
    watched: bool
    """Whether somebody else will tell why this member lost another one."""
    elastic: bool
    """Whether those who are left can meet again when a member is lost."""
    met: bool
    """Whether this member is among the others, not between two generations."""
    tell: Callable[[str], None]
    """Called, by any thread, with what a person should know: who is awaited, say."""

    def regroup(self, progress: Sequence[int], lost: PeerError | None) -> Healing:
        """Meet again as another generation; `progress` says who is further than whom."""
        ...

    def report(self, records: Sequence[Sequence[int]]) -> None:
        """What was committed, [epoch, start, stop, first version, last version] each."""
        ...

    def alone(self) -> None:
        """Leave the others until the next `regroup`: what was begun with them is void."""
        ...

    def on_record(self, version: int) -> bool | None:
        """Whether the updates up to this version are in the journal; None if not yet."""
        ...

    def rolled_back(self, version: int, why: str) -> None:
        """What came after this version never was."""
        ...

    def divided(self, version: int, shares: Sequence[float]) -> None:
        """From this version on each member's part of a batch is this share of it."""
        ...

    def close(self) -> None: ...


class Codec(Protocol):
    """How a gradient or a delta is made small for the wire.

    `encode` may keep what it left out (the residual) and add it to the next call; that residual
    is part of every checkpoint.
    """

    name: str

    def encode(self, key: str, values: Tensor) -> Tensor:
        """A contiguous uint8 tensor that says these values."""
        ...

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the values of `payload` into `out`; refuse a payload that does not fit."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Strategy(Protocol):
    """One way to synchronise. Every one passes the suite in tests/contract/."""

    shard: Shard
    model: nn.Module
    whole: bool
    """Whether `model` is all of it, and can be called by this member alone."""
    alone: bool
    """Whether this member can make a `state_dict` that is complete without the others."""
    remote: bool
    """Whether weights and optimizer live with servers, and it is a `RemoteStrategy`."""
    apart: bool
    """Whether members make updates each for itself, and meet now and then."""

    def setup(self, task: Task, comm: Comm) -> None:
        """Build model and optimizer from the task's factories."""
        ...

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        """Forward and, unless evaluating, backward over all of `micro`, adding up gradients."""
        ...

    def update(self, lease: Lease | None = None) -> Update:
        """Turn the gradients, of these samples, into one update, wherever the optimizer runs."""
        ...

    def total(self, stats: Stats) -> Stats:
        """These stats summed up over all members, each sample once."""
        ...

    def observe(self, value: float) -> None:
        """Let the schedule hear a validation result (smaller is better); called by all."""
        ...

    def rate(self) -> float:
        """The learning rate of the last update."""
        ...

    def size(self) -> int:
        """How many numbers all parameters of the model are, wherever they lie."""
        ...

    def remarks(self) -> Sequence[str]:
        """What a person should know of how this model will be trained, a line each."""
        ...

    def rejoin(self) -> None:
        """The members have changed: give up what was under way, and meet the new ones."""
        ...

    def held(self) -> tuple[int, int] | None:
        """Which of how many parts of the state this member holds; None if it is not in parts."""
        ...

    def lend(self, holders: Any) -> None:
        """From now on `state_dict` is made with these, a collective of all parts' holders."""
        ...

    def balance(self) -> Sequence[float]:
        """Divide batches by the members' speeds; returns their shares. Called by all together."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Whole tensors by name, whatever this member holds of them. Members call it together;
        only member 0's answer is sure to be complete."""
        ...

    def healing(self) -> dict[str, Any]:
        """What `load_state_dict` of one that is behind needs, beside what it can get elsewhere."""
        ...

    def settle(self) -> bool:
        """Give up an update that broke off; returns whether the state is that of its version."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def let_go(self) -> None:
        """Give the model back as it came; the members may go on with another strategy."""
        ...

    def close(self) -> None: ...


class RemoteStrategy(Strategy, Protocol):
    """Weights and optimizer live with servers, who also know which samples they took in."""

    lacks_state: bool
    """Whether the servers have lost the state, or part of it: somebody has to load one."""
    share: int
    """Samples of this member's next update where it makes them for itself; 0: as the job says."""
    pace: float | None
    """Seconds per sample."""
    foresees: bool
    """Whether it is worth telling it what to `expect`."""

    def expect(self, micro: Sequence[Batch]) -> None:
        """These are computed after the next ones. No result depends on whether it is told."""
        ...

    def spool(self, folder: Path) -> None:
        """Parts of `state_dict` that are too large for memory may lie in files of this folder."""
        ...

    def pull(self) -> int:
        """Have the servers' weights, to look at; returns their version."""
        ...

    def rest(self) -> None:
        """No update comes from this member for now: nobody is to wait for it."""
        ...

    def leave_out(self, lease: Lease) -> None:
        """These samples are done with, without an update."""
        ...

    def consumed(self) -> dict[str, Any]:
        """The ledger as the servers know it."""
        ...

    def unheard(self, version: int) -> Sequence[Sequence[int]]:
        """What the servers took in after `version`: (epoch, start, stop, version, member) each."""
        ...

    def figures(self) -> dict[str, float]:
        """Of this member and the servers: staleness, bytes, seconds waited, updates refused, …"""
        ...


class Observer(Protocol):
    """Sees a run go by. It reads, never changes training, and its failure never stops it."""

    def started(self, run: str, facts: Mapping[str, Any]) -> None: ...

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """Where the run is right now, a few times a second: epoch, samples, loss, lr, rates."""
        ...

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Figures to keep, every `track.every` steps."""
        ...

    def evaluated(self, step: int, values: Mapping[str, float]) -> None: ...

    def noticed(self, step: int, message: str) -> None:
        """Something a person should know: a health warning, a failure, a recovery."""
        ...

    def finished(self, status: str, summary: Mapping[str, Any]) -> None: ...


OptimizerFactory: TypeAlias = "Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]"


# --- task ---
# The user's part: what to train.


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The usual forward: the model takes the column `x`."""
    return model(batch["x"])


@dataclass(slots=True)
class Task:
    """Model, loss, optimizer, data and metrics of one job.

    `model` and `optimizer` are best given as factories: a strategy may shard the model before
    the optimizer sees it, or build both on another machine. A ready `nn.Module` is taken too.

    `train` and `valid` may be a `BatchSource`, any torch `Dataset`, a mapping of tensors or
    arrays (column → values), or the path of a folder of shards.

    `loss` maps (model output, batch) to a (sum, weight) pair; `forward` says how the model is
    called, and defaults to `model(batch["x"])`. A metric is a `Metric`, or a function like
    `loss` whose sums are divided at the end.

    `decode` turns a batch of outputs into plain data for `echelon predict`; `samples` gives a few
    outputs of the trained model to show in the report. `fitted` is what was
    learnt from the training data beside the weights (vocabulary, label names, …): plain data,
    kept with the run.
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
