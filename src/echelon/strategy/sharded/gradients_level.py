"""Level `gradients`: weights whole everywhere, gradients and the optimizer's state divided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.core.types import Batch, Stats
from echelon.strategy.sharded.divided import Divided
from echelon.strategy.sharded.optimizer_level import OptimizerLevel
from echelon.strategy.sharded.pieces import Piece
from echelon.strategy.sharded.reduction import Reduction


class GradientsLevel(Divided, OptimizerLevel):
    """Every backward pass ends with its gradients at their owners."""

    def _join(self) -> None:
        self._divide()
        self._reduction = Reduction(self._peers, self._parameters, self._slabs)
        self._hooks = self._reduction.hooks

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        stats = super().compute(micro, backward=backward)
        if backward and not self._lockstep:
            for _ in range(len(micro), self._numerics.micro):
                self._reduction.flush()  # the others have one more pass
        return stats

    def _backward(self, loss_sum: Tensor) -> None:
        super()._backward(loss_sum)
        self._reduction.flush()

    def _held(self) -> list[Piece]:
        return self._slabs.pieces

    def _parts(self) -> list[Tensor | None]:
        seen = self._everywhere_seen(self._reduction.seen)
        return [
            part if used else None for part, used in zip(self._reduction.parts, seen, strict=True)
        ]

    def _explain(self) -> str:
        # What is looked at is the gradient of whole parameters: mark those that are spoilt.
        for at in self._spoilt():
            parameter = self._parameters[at]
            parameter.grad = parameter.new_full((), torch.nan).expand_as(parameter)
        return super()._explain()

    def _clear(self) -> None:
        super()._clear()
        self._reduction.clear()
