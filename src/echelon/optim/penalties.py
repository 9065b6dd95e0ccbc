"""L1, L2 and weight decay, over whole lists of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PENALTIES = ("l1", "l2", "decay")


def is_penalised(group: Mapping[str, Any]) -> bool:
    return any(group.get(name) for name in PENALTIES)


def penalise_(params: list[Tensor], grads: list[Tensor], group: Mapping[str, Any]) -> None:
    """Add l2·w and l1·sign(w) to the gradients, then shrink w by lr·decay·w."""
    if l2 := group.get("l2"):
        torch._foreach_add_(grads, params, alpha=l2)
    if l1 := group.get("l1"):
        torch._foreach_add_(grads, torch._foreach_sign(params), alpha=l1)
    if decay := group.get("decay"):
        torch._foreach_mul_(params, 1 - group["lr"] * decay)
