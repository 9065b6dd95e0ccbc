"""Gradients to sum, the serial sum to compare with, and members that sum them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.comm import Group
from echelon.comm.interface import GradientSum, Sums

from .processes import run

TINY = [(3,), (), (5, 2)]
UNEVEN = [(17, 31), (1,), (), (129, 257), (64,), (60, 1000)]  # more than the small way takes
LARGE = [(250, 200), (7,), (150, 200), (3, 5)]  # several buckets, where those are small
EVERY_WAY: list[tuple[int, str | None]] = [
    *((2, None), (3, None), (4, None)),
    *((2, "ab"), (4, "aabb"), (3, "aba")),
]


few_or_many = pytest.mark.parametrize("shapes", [TINY, UNEVEN])


def among(*ways: tuple[int, str | None]) -> pytest.MarkDecorator:
    """So many members, on these hosts."""
    return pytest.mark.parametrize(("count", "hosts"), ways)


Part = Callable[[Group, list[Tensor], GradientSum], Any]
"""One member's: the parameters, and the sum of their gradients."""


def run_sums(count: int, hosts: str | None, like: Sequence[Tensor], part: Part) -> list[Any]:
    def body(group: Group) -> Any:
        return part(group, list(like), group.collective().gradients(like))

    return run(count, body, hosts=hosts)


def meet(sums: GradientSum, share: float, mine: Sequence[Tensor | None]) -> Sums:
    """One update."""
    sums.begin([share])
    sums.put_all(mine)
    return sums.finish()


def ones(like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(p) for p in like]


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


def gradients(like: Sequence[Tensor], member: int, update: int) -> list[Tensor]:
    """The same ones in whichever process they are made; strided as their parameters."""
    generator = torch.Generator().manual_seed(1000 * member + update)
    return [
        torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
        for p in like
    ]


def weight(member: int, update: int) -> float:
    return float((3 * member + update) % 5)


def mean(like: Sequence[Tensor], count: int, update: int) -> list[Tensor]:
    """As one process would find it, in double precision."""
    every = [gradients(like, member, update) for member in range(count)]
    divisor = sum(weight(member, update) for member in range(count))
    return [sum(g.double() for g in column) / divisor for column in zip(*every, strict=True)]


def difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    pairs = zip(left, right, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)
