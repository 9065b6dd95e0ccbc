"""Level `optimizer`: weights and gradients whole everywhere, the optimizer's state divided.

all_reduce's gradients ─▶ each member steps its slices ─▶ slices to all
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.interface import Collective
from echelon.optim import Stepper
from echelon.strategy.all_reduce import AllReduce
from echelon.strategy.sharded.axes import sharded_group
from echelon.strategy.sharded.freeing import give_back_large
from echelon.strategy.sharded.optimizer import divide, own_state, whole_state
from echelon.strategy.sharded.pieces import gathered, in_row
from echelon.strategy.sharded.slabs import Slabs
from echelon.strategy.synchronous import Met


class OptimizerLevel(AllReduce):
    """Gradients as in all_reduce; a step is made together."""

    alone = False

    def _place(self) -> None:
        give_back_large()
        super()._place()
        self._shards: Collective = sharded_group(
            self._comm, self._peers, self._parallel, self._numerics.device
        )

    def _join(self) -> None:
        self._divide()
        super()._join()
        # Slices of what others may be reading are copied, not wholes.
        self._copied, self._own = self._own is not None, None

    def _divide(self) -> None:
        group = self._shards
        self._slabs = Slabs(self._names, self._parameters, group.index, group.count)
        pieces = self._slabs.pieces
        optimizer = self._stepper.optimizer
        divide(optimizer, dict(zip(self._parameters, pieces, strict=True)), group.index)
        frozen = [(name, p) for name, p in self.model.named_parameters() if not p.requires_grad]
        parts = [(piece.name, piece.local) for piece in pieces]
        self._stepper = Stepper(optimizer, [*parts, *frozen])

    def _meet(self) -> Met:
        met = super()._meet()
        for parameter, piece in zip(self._parameters, self._slabs.pieces, strict=True):
            piece.local.grad = self._part_of(parameter.grad, piece.ranges[self._shards.index])
        return met

    def _part_of(self, gradient: Tensor | None, mine: tuple[int, int]) -> Tensor | None:
        return None if gradient is None else in_row(gradient)[slice(*mine)]

    def _clip(self) -> None:
        super()._clip()
        if self._copied:
            for piece in self._slabs.pieces:
                if piece.local.grad is not None:
                    piece.local.grad = piece.local.grad.clone()

    def _applied(self) -> None:
        with torch.no_grad():
            self._slabs.share(self._shards)
        self._release()

    def held(self) -> tuple[int, int] | None:
        return self._shards.index, self._shards.count

    def lend(self, holders: Collective) -> None:
        self._shards = holders

    def _optimizer_state(self) -> dict[str, Any]:
        return whole_state(super()._optimizer_state(), self._slabs.pieces, self._shards, gathered)

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        pieces = self._slabs.pieces
        super()._load_optimizer_state(own_state(state, pieces, self._shards.index))

    def _clear(self) -> None:
        super()._clear()
        for piece in self._slabs.pieces:
            piece.local.grad = None

    def let_go(self) -> None:
        if isinstance(self._task.model, nn.Module):
            self._slabs.let_go(self._parameters)
        super().let_go()
