"""What the members saw of the held-out samples, added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from echelon.core.types import Stats

_DIMS = 6
_KINDS = (torch.float64, torch.float32, torch.int64)


class Summing(Protocol):
    """The part of a collective that is needed here."""

    def sum(self, values: Sequence[float]) -> list[float]: ...

    def sum_(self, tensor: Tensor) -> None: ...


def total(collective: Summing, stats: Stats, names: Sequence[str]) -> Stats:
    """Sums over all members. One without samples has no metrics, and learns their shapes first."""
    loss_sum, weight = collective.sum([float(stats.loss_sum), stats.weight])
    metrics: dict[str, Tensor] = {}
    if names:
        shapes = torch.tensor([_described(stats.metrics.get(name)) for name in names])
        collective.sum_(shapes)
        for name, shape in zip(names, shapes.tolist(), strict=True):
            if shape[0]:
                metrics[name] = _summed(collective, stats.metrics.get(name), shape)
    return Stats(torch.tensor(loss_sum, dtype=torch.float64), weight, metrics)


def _described(part: Tensor | None) -> list[int]:
    """How many describe it (one), its kind, its dimensions; all zero where there is nothing."""
    if part is None:
        return [0] * (3 + _DIMS)
    assert part.ndim <= _DIMS, f"a metric of {part.ndim} dimensions"
    sizes = [*part.shape, *[0] * (_DIMS - part.ndim)]
    return [1, _KINDS.index(_kind(part)), part.ndim, *sizes]


def _summed(collective: Summing, part: Tensor | None, shape: list[int]) -> Tensor:
    kind, ndim, *sizes = (number // shape[0] for number in shape[1:])
    dtype = _KINDS[kind]
    whole = torch.zeros(sizes[:ndim], dtype=dtype)
    if part is not None:
        whole.copy_(part)
    collective.sum_(whole)
    return whole


def _kind(part: Tensor) -> torch.dtype:
    if part.dtype == torch.float64:
        return torch.float64
    return torch.float32 if part.is_floating_point() else torch.int64
