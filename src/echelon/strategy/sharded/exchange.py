"""What torch's `fully_shard` gathers and sums with on a CPU: the members' own collective.

Between processes of one host that is memory they share, several times as fast as gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.comm.interface import Collective
from echelon.core.errors import TaskError


class Exchange:
    """The part of both that torch asks for. `number` says for which layer."""

    def __init__(self, group: Collective, number: int, name: str) -> None:
        self._group, self._number, self._name = group, number, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _meet(self, number: int) -> None:
        """Layers are often alike: nothing else would tell that weights of two were mixed.

        Only if all say the same number are Σ n = count · n and Σ n² = count · n².
        """
        count = self._group.count
        if self._group.sum([number, number * number]) != [count * number, count * number * number]:
            raise TaskError(
                f"members went through different layers ({self._name!r} in this one): under "
                f"sharded.level parameters all have to use the same ones; take level gradients"
            )


class AllGather(Exchange):
    """Everybody's part in everybody's output."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_options: Any) -> None:
        self._meet(2 * self._number + 1)
        parts = output_tensor.chunk(self._group.count)
        assert parts[self._group.index].data_ptr() == input_tensor.data_ptr(), "gathered in place"
        for source, part in enumerate(parts):
            self._group.broadcast_([part], source)


class ReduceScatter(Exchange):
    """Sums; torch was told to ask for nothing else."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_options: Any) -> None:
        self._meet(2 * self._number + 2)
        self._group.sum_(input_tensor)
        output_tensor.copy_(input_tensor.chunk(self._group.count)[self._group.index])
        # torch holds on to it, unread, until the next layer's gradients are there.
        input_tensor.untyped_storage().resize_(0)
