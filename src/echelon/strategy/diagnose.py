"""Where a non-finite number came from: the input column, or the first layer, or the gradient.

This is the slow path, only taken after a non-finite number was found: the batches go through the
model once more, and hooks look at every layer's output. `explain` is for a member that can do this
alone, `explain_together` and `explain_stage` for members that have parts of the model. With `agree`
all members raise the same explanation, that of the member nearest to the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.comm.interface import Collective
from echelon.core.types import Batch
from echelon.optim import gradients


def explain(
    model: nn.Module,
    forward: Callable[[nn.Module, Batch], Any],
    micro: Iterable[Batch],
    loss_sum: Tensor,
    version: int,
    table: str | None = None,
) -> str:
    """Return one line with the step and the layer; `table` is one with non-finite row gradients."""
    step = version + 1
    named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    layer = gradients.first_non_finite(named)
    loss = float(loss_sum)
    if torch.isfinite(loss_sum) and layer:
        return f"step {step}: the gradient of layer {layer!r} is not finite (loss sum {loss:g})"
    if torch.isfinite(loss_sum) and table:
        return f"step {step}: the gradient of table {table!r} is not finite (loss sum {loss:g})"
    for batch in micro:
        if column := bad_column(batch):
            return f"step {step}: the loss is {loss}: input column {column!r} is not finite"
        if culprit := bad_layer(model, forward, batch):
            return f"step {step}: the loss is {loss}: layer {culprit!r} first gave it"
    return f"step {step}: the loss is {loss}, though every layer's output is finite"


def blame(micro: Iterable[Batch], loss_sum: Tensor) -> int:
    """Return how near a member is to the cause: 2 for its input, 1 for its loss, 0 for neither."""
    if any(bad_column(batch) for batch in micro):
        return 2
    return 0 if bool(torch.isfinite(loss_sum)) else 1


def bad_column(batch: Batch) -> str | None:
    for name, column in batch.items():
        values = column if isinstance(column, Tensor) else column.values
        if values.is_floating_point() and not torch.isfinite(values).all():
            return name
    return None


def bad_layer(
    model: nn.Module, forward: Callable[[nn.Module, Batch], Any], batch: Batch
) -> str | None:
    """Return the first layer, in the order of the calls, whose output is not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            given = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if not found and not all(bool(torch.isfinite(leaf).all()) for leaf in given):
                found.append(name)

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if name and not any(True for _ in module.children())
    ]
    try:
        # Dropout draws numbers here, which must not change the state of the run's generator.
        with torch.random.fork_rng(), torch.no_grad():
            forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


# Members that can only go forward together


def explain_together(
    model: nn.Module,
    forward: Callable[[nn.Module, Batch], Any],
    micro: Iterable[Batch],
    loss_sum: Tensor,
    version: int,
    spoilt: Sequence[str],
) -> str:
    """Return one line like `explain`, for members that go forward together: through all batches.

    `spoilt` are the parameters with a gradient that is not finite.
    """
    step, loss = version + 1, float(loss_sum)
    found = [(bad_column(batch), bad_layer(model, forward, batch)) for batch in micro]
    if torch.isfinite(loss_sum):
        layer = spoilt[0] if spoilt else "?"
        return f"step {step}: the gradient of layer {layer!r} is not finite (loss sum {loss:g})"
    for column, culprit in found:
        if column:
            return f"step {step}: the loss is {loss}: input column {column!r} is not finite"
        if culprit:
            return f"step {step}: the loss is {loss}: layer {culprit!r} first gave it"
    return f"step {step}: the loss is {loss}, though every layer's output is finite"


# Members that have stages of a pipeline


def explain_stage(
    world: Collective, model: nn.Module, forward: Forward, micro: Sequence[Batch], loss: float
) -> str:
    """Return one line without the step, the same on all members. All members call this together,
    because `forward` passes through all stages."""
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
    """Look at every batch on all members: each stage waits for the output of the one before it."""
    names = [name for name, _ in model.named_modules()]
    said = f"the loss is {loss}"
    found = [_Found(_UNKNOWN, f"{said}, though every layer's output is finite")]
    for at, batch in enumerate(micro):
        first = at * (len(names) + 1)
        if column := bad_column(batch):
            found.append(_Found(first, f"{said}: input column {column!r} is not finite"))
            break  # all members of this replica stop here: they see the same batch
        if layer := bad_layer(model, forward, batch):
            rank = first + 1 + names.index(layer)
            found.append(_Found(rank, f"{said}: layer {layer!r} first gave it"))
    return min(found)


class _Found(NamedTuple):
    """What one member found. The one with the lowest rank, by batch and layer, is reported."""

    rank: int
    words: str


_UNKNOWN = 1 << 40
Forward = Callable[[nn.Module, Batch], Any]


# One explanation for all members


_BYTES = 600
"""Bytes of a text that are sent; the rest is cut off."""


def agree(collective: Collective, text: str, blame: int) -> str:
    """Return the text of the member with the highest `blame`, or of the first of several."""
    board = torch.zeros(collective.count, _BYTES + 1, dtype=torch.int64)
    said = torch.tensor(list(text.encode()[:_BYTES]), dtype=torch.int64)
    board[collective.index, 0] = blame
    board[collective.index, 1 : 1 + len(said)] = said
    collective.sum_(board)
    chosen = int(board[:, 0].argmax())
    letters = bytes(value for value in board[chosen, 1:].tolist() if value)
    words = letters.decode(errors="ignore")
    return words if collective.count == 1 else f"{words} (member {chosen})"
