"""Where a non-finite number came from. The slow path: only taken when one was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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
