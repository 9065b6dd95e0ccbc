"""Where a non-finite number came from, when every member sees a part of the model only.

The slow path: all members of a replica send the batches through once more, and watch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from echelon.comm.interface import Collective
from echelon.core.types import Batch
from echelon.optim import gradients
from echelon.strategy.agree import agree
from echelon.strategy.fault import bad_column, bad_layer

Forward = Callable[[nn.Module, Batch], Any]


_UNKNOWN = 1 << 40


class _Found(NamedTuple):
    """What one member found; the first along the batches and the layers is what all will say."""

    rank: int
    words: str


def explain(
    world: Collective, model: nn.Module, forward: Forward, micro: Sequence[Batch], loss: float
) -> str:
    """One line, the same for all, without the step. Collective: `forward` is, too."""
    if math.isfinite(loss):
        found = _in_gradients(model, loss)
    else:
        found = _in_loss(model, forward, micro, loss)
    return agree(world, found.words, -found.rank)


def _in_gradients(model: nn.Module, loss: float) -> _Found:
    named = list(model.named_parameters())
    layer = gradients.first_non_finite((n, p.grad) for n, p in named if p.grad is not None)
    words = f"the gradient of layer {layer!r} is not finite (loss sum {loss:g})"
    rank = _UNKNOWN if layer is None else [name for name, _ in named].index(layer)
    return _Found(rank, words)


def _in_loss(model: nn.Module, forward: Forward, micro: Sequence[Batch], loss: float) -> _Found:
    """Every batch is looked at by all alike, for each waits for what the one before it gives."""
    names = [name for name, _ in model.named_modules()]
    said = f"the loss is {loss}"
    found = [_Found(_UNKNOWN, f"{said}, though every layer's output is finite")]
    for at, batch in enumerate(micro):
        first = at * (len(names) + 1)
        if column := bad_column(batch):
            found.append(_Found(first, f"{said}: input column {column!r} is not finite"))
            break  # all of this replica see the same batch
        if layer := bad_layer(model, forward, batch):
            rank = first + 1 + names.index(layer)
            found.append(_Found(rank, f"{said}: layer {layer!r} first gave it"))
    return min(found)
