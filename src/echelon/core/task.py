"""The user's part: what to train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.core.protocols import Augment, Loss, Metric, OptimizerFactory
from echelon.core.types import Batch

if TYPE_CHECKING:
    from torch import nn


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
