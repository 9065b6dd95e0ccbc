"""What a loss has to give."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from echelon.core.errors import TaskError


def as_pair(found: Any) -> tuple[Tensor, float]:
    """A loss is a (sum, weight) pair: a tensor of one number, and a number."""
    try:
        loss_sum, weight = found
    except (TypeError, ValueError):
        raise TaskError(
            f"the loss gave {_described(found)}: it must give a pair, (sum over samples, weight)"
        ) from None
    if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1:
        raise TaskError(f"the loss gave {_described(loss_sum)} for its sum: it must be one number")
    return loss_sum, float(weight)


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"
