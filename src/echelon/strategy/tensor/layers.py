"""Linear layers of which every member of a team computes a part (Shoeybi et al. 2019).

    x ──▶ columns ──▶ own outputs ─ elementwise ─▶ rows ──▶ Σ over the team ──▶ y
    Σ over the team ◀── dx                                              dy ◀── the same for all

Dropout between them draws numbers of each member's own, everywhere else the same ones for all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.comm.interface import Collective
from echelon.strategy.tensor.chance import Chance


@dataclass(frozen=True, slots=True)
class Team:
    """Those that compute a layer together."""

    group: Collective
    chance: Chance


def cut_columns(layer: nn.Linear, team: Team, *, first: bool) -> None:
    """Its weight and bias hold the outputs of this member alone. `first`: of its group."""
    # Patched rather than replaced: names and the user's own module stay what they are.
    layer.forward = functools.partial(_columns, layer, team, first)  # type: ignore[method-assign]


def cut_rows(layer: nn.Linear, team: Team) -> None:
    """Its weight holds what belongs to this member's inputs; its bias is whole."""
    layer.forward = functools.partial(_rows, layer, team)  # type: ignore[method-assign]


def restore(model: nn.Module) -> None:
    """Take the patches off. What the layers hold stays a part."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, functools.partial) and patched.func in (_columns, _rows):
            del module.__dict__["forward"]


def _columns(layer: nn.Linear, team: Team, first: bool, x: Tensor) -> Tensor:
    alike: Tensor = _SumBackward.apply(x, team.group)  # type: ignore[no-untyped-call]
    y = F.linear(alike, layer.weight, layer.bias)
    if layer.training and first:
        team.chance.part()
    return y


def _rows(layer: nn.Linear, team: Team, x: Tensor) -> Tensor:
    if layer.training:
        team.chance.join()
    part = F.linear(x, layer.weight)
    y: Tensor = _SumForward.apply(part, team.group)  # type: ignore[no-untyped-call]
    return y if layer.bias is None else y + layer.bias


class _SumBackward(torch.autograd.Function):
    """What all have alike goes different ways: gradients come back from all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _summed(grads[0], ctx.group), None


class _SumForward(torch.autograd.Function):
    """Every member has a summand; the gradient of a sum is that of each summand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Collective) -> Tensor:  # noqa: ARG004 (torch's way)
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


def _summed(x: Tensor, group: Collective) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.sum_(total)
    return total
