"""Augmentation that blends samples with one another."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.core.interfaces import Draws
from echelon.core.types import Batch
from echelon.data.batch import dense


@dataclass(frozen=True)
class Mixup:
    """Blend each sample with its neighbour in the batch, with a share from Beta(alpha, alpha).

    Samples 2i and 2i + 1 of a batch are partners (the order is shuffled, so any pairing is as
    good); an odd last one stays as it is. Where the target `y` is a class, it stays, and two
    columns are added: `y2`, the partner's class, and `mix`, the share of the sample's own. So a
    loss remains a (sum, weight) pair: Σ mix·loss(y) + (1 − mix)·loss(y2), over the batch size.
    A target of floats is blended like `x`.
    """

    alpha: float

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        x, y = dense(batch, "x"), dense(batch, "y")
        share = _beta(self.alpha, draws.uniform(0), draws.uniform(1))
        partner = torch.arange(len(x), device=x.device) ^ 1
        partner[-1].clamp_(max=len(x) - 1)
        mixed = {**batch, "x": _blend(x, x.index_select(0, partner), share)}
        if y.is_floating_point():
            return {**mixed, "y": _blend(y, y.index_select(0, partner), share)}
        return {**mixed, "y2": y.index_select(0, partner), "mix": share}


def _beta(alpha: float, first: Tensor, second: Tensor) -> Tensor:
    """Numbers from Beta(alpha, alpha), exactly, from two uniform ones each.

    With t² = (u^(−1/alpha) − 1)·cos²(2πv), which is that of a Student's t over its degrees of
    freedom 2·alpha, ½ ± ½/√(1 + 1/t²) is a symmetric beta (Devroye 1996). Double precision, as
    a small alpha asks for the far ends.
    """
    u, v = 1 - first.double(), second.double()
    cosine = torch.cos(2 * math.pi * v)
    squared = (torch.expm1(-u.log() / alpha) * cosine.square()).abs()  # never −0
    return (0.5 + 0.5 * cosine.sign() / (1 + 1 / squared).sqrt()).float()


def _blend(own: Tensor, other: Tensor, share: Tensor) -> Tensor:
    share = share.view(-1, *[1] * (own.ndim - 1))
    mixed = torch.lerp(other.float(), own.float(), share)
    return mixed.to(own.dtype) if own.is_floating_point() else mixed.round_().to(own.dtype)
