"""Where a non-finite number came from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.comm.interface import Collective
from echelon.core.types import Batch
from echelon.optim import gradients

# --- strategy/fault ---
# Where a non-finite number came from. The slow path: only taken when one was found.


def explain(
    model: nn.Module,
    forward: Callable[[nn.Module, Batch], Any],
    micro: Iterable[Batch],
    loss_sum: Tensor,
    version: int,
    table: str | None = None,
) -> str:
    """One line with the step and the layer; `table` has row gradients that are not finite."""
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
    """How near a member is to the cause: its samples, then its loss, then what others gave it."""
    if any(bad_column(batch) for batch in micro):
        return 2
    return 0 if bool(torch.isfinite(loss_sum)) else 1


def explain_together(
    model: nn.Module,
    forward: Callable[[nn.Module, Batch], Any],
    micro: Iterable[Batch],
    loss_sum: Tensor,
    version: int,
    spoilt: Sequence[str],
) -> str:
    """As `explain`, where members can go forward only together: all go through all batches.

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


def bad_column(batch: Batch) -> str | None:
    for name, column in batch.items():
        values = column if isinstance(column, Tensor) else column.values
        if values.is_floating_point() and not torch.isfinite(values).all():
            return name
    return None


def bad_layer(
    model: nn.Module, forward: Callable[[nn.Module, Batch], Any], batch: Batch
) -> str | None:
    """The first layer, in the order they are called, whose output is not finite."""
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
        # Dropout draws again here; the run's own generator must not notice.
        with torch.random.fork_rng(), torch.no_grad():
            forward(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


# --- pipeline/fault ---
# Where a non-finite number came from, when every member sees a part of the model only.
#
# The slow path: all members of a replica send the batches through once more, and watch.

Forward = Callable[[nn.Module, Batch], Any]


_UNKNOWN = 1 << 40


class _Found(NamedTuple):
    """What one member found; the first along the batches and the layers is what all will say."""

    rank: int
    words: str


def explain_stage(
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


# --- agree ---
# One explanation for all members.

_BYTES = 600


class Summing(Protocol):
    """The part of a collective that is needed here."""

    index: int
    count: int

    def sum_(self, tensor: Tensor) -> None: ...


def agree(collective: Summing, text: str, blame: int) -> str:
    """The words of the member that is most to blame; of the first, if several are."""
    board = torch.zeros(collective.count, _BYTES + 1, dtype=torch.int64)
    said = torch.tensor(list(text.encode()[:_BYTES]), dtype=torch.int64)
    board[collective.index, 0] = blame
    board[collective.index, 1 : 1 + len(said)] = said
    collective.sum_(board)
    chosen = int(board[:, 0].argmax())
    letters = bytes(value for value in board[chosen, 1:].tolist() if value)
    words = letters.decode(errors="ignore")
    return words if collective.count == 1 else f"{words} (member {chosen})"
