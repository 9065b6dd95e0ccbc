"""How large everybody's weights and gradients are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from echelon.comm.interface import Collective
from echelon.optim import gradients


def all_norms(
    world: Collective, names: Sequence[str], mine: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and gradients of all members, each as one number: it has the norm of the whole.

    `mine` are the parameters that are this member's to tell of; one without gradient is left out.
    """
    held = [(name, p.detach(), p.grad) for name, p in mine.items() if p.grad is not None]
    sizes = gradients.layer_norms((name, weight) for name, weight, _ in held)
    slopes = gradients.layer_norms((name, grad) for name, _, grad in held)
    norms = torch.zeros(len(names), 3, dtype=torch.float64)
    for at, name in enumerate(names):
        if name in sizes:
            norms[at] = torch.tensor([1.0, sizes[name], slopes[name]])
    world.sum_(norms)
    found = [(name, row) for name, row in zip(names, norms, strict=True) if row[0]]
    return {name: row[1] for name, row in found}, {name: row[2] for name, row in found}
