"""Losses: functions of (model output, batch) that return a sum over the samples and their weight.

A mean would be wrong as soon as batches differ in size; the strategy divides once, after summing
over all members.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from echelon.core.types import Batch

IGNORED = -100
"""The class target of positions that do not count, as in torch and transformers."""


def cross_entropy(output: Any, batch: Batch, *, target: str = "y") -> tuple[Tensor, Tensor | float]:
    """Compare class scores [B, C] or [B, T, C] with class numbers [B] or [B, T].

    In sequences, targets of -100 do not count. `output` is a tensor, or an object with `logits`,
    as models of transformers return. Batches blended by mixup (columns `y2`, `mix`) are scored
    against both of their targets. A column `weight` gives each sample's weight.
    """
    scores, y = logits(output), _tensor(batch, target)
    if "weight" in batch:
        return _weighed(scores, y, batch, target)
    if "mix" in batch:
        return _mixed(scores, y, _tensor(batch, f"{target}2"), _tensor(batch, "mix"))
    if y.dim() == 1:
        return F.cross_entropy(scores, y, reduction="sum"), y.numel()
    flat = y.reshape(-1)
    loss_sum = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), flat, reduction="sum")
    return loss_sum, (flat != IGNORED).sum()


def binary_cross_entropy(output: Any, batch: Batch) -> tuple[Tensor, float]:
    """Compare one score (logit) per sample with targets 0 and 1."""
    scores, y = logits(output).reshape(-1), _tensor(batch, "y").reshape(-1)
    target = y.to(scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, target, reduction="sum"), y.numel()


def squared_error(output: Any, batch: Batch) -> tuple[Tensor, float]:
    """Compare predicted numbers with targets; the weight is the number of targets."""
    scores, y = logits(output), _tensor(batch, "y")
    return F.mse_loss(scores.reshape(y.shape), y.to(scores.dtype), reduction="sum"), y.numel()


def logits(output: Any) -> Tensor:
    """Return the scores in a model's output: the tensor itself, or its attribute `logits`."""
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    if isinstance(found, Tensor):
        return found
    raise TypeError(
        f"the model gave a {type(output).__name__}: a tensor, or an object with `logits`, "
        f"is needed here; write a loss of your own for others"
    )


def _mixed(scores: Tensor, y: Tensor, y2: Tensor, mix: Tensor) -> tuple[Tensor, float]:
    one = F.cross_entropy(scores, y, reduction="none")
    other = F.cross_entropy(scores, y2, reduction="none")
    return (mix * one + (1 - mix) * other).sum(), y.numel()


def _weighed(scores: Tensor, y: Tensor, batch: Batch, target: str) -> tuple[Tensor, Tensor]:
    weight = _tensor(batch, "weight").to(scores.dtype)
    each = F.cross_entropy(scores, y, reduction="none")
    if "mix" in batch:
        mix = _tensor(batch, "mix")
        other = F.cross_entropy(scores, _tensor(batch, f"{target}2"), reduction="none")
        each = mix * each + (1 - mix) * other
    return (each * weight).sum(), weight.sum()


def _tensor(batch: Batch, name: str) -> Tensor:
    column = batch[name]
    assert isinstance(column, Tensor), f"column {name!r} is sparse"
    return column
