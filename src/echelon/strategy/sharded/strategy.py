"""Sharded data parallelism with complete weights everywhere: levels `optimizer` and `gradients`.

    level        weights    gradients  optimizer state
    optimizer    complete   complete   divided           all_reduce's gradients ─▶ each member steps
                                                         its slices ─▶ slices to all
    gradients    complete   divided    divided           each backward pass ends with its gradients
                                                         at their owners
    parameters   divided    divided    divided           in `parameters.py`

The weights are in flat slabs, and each member owns a slice of every slab (`slabs.py`). Checkpoints
hold complete tensors, so they do not depend on the number of members.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.buckets import square_sum
from echelon.comm.interface import Collective
from echelon.core.errors import TaskError
from echelon.core.interfaces import Inspector
from echelon.core.types import Batch, Stats
from echelon.optim import Stepper, gradients
from echelon.strategy.all_reduce import AllReduce
from echelon.strategy.base import NO_GRADIENT, Met, Synchronous
from echelon.strategy.optimizer_shards import (
    Piece,
    divide,
    gathered,
    in_row,
    own_state,
    sharded_group,
    whole_state,
)
from echelon.strategy.sharded.slabs import Reduction, Slabs, give_back_large


class OptimizerLevel(AllReduce):
    """Level `optimizer`: gradients as in all-reduce, but each member steps its slices only."""

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
        # Other members may be reading the summed gradients: copy this member's slices only.
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


class Divided(Synchronous):
    """Mixin for levels that divide gradients: each member looks at its part, and all agree.

    It comes before the strategy whose gradients are complete.
    """

    alone = False
    _peers: Collective
    """All members."""
    _shards: Collective
    """The members that hold one model between them."""

    def held(self) -> tuple[int, int] | None:
        return self._shards.index, self._shards.count

    def lend(self, holders: Collective) -> None:
        self._shards = holders

    @abstractmethod
    def _held(self) -> list[Piece]:
        """Return this member's pieces, one for each trained parameter."""

    @abstractmethod
    def _parts(self) -> list[Tensor | None]:
        """Return the summed gradients of the pieces; None where no member had one."""

    def _known(self) -> None:
        """Do nothing: the sums are exchanged in `_meet`."""

    def _meet(self) -> Met:
        mine = [self._weight, self._loss_sum.item(), float(self._comm.asked)]
        weight, loss_sum, asked = self._peers.sum(mine)
        parts = self._parts()
        for piece, part in zip(self._held(), parts, strict=True):
            piece.local.grad = part
        if all(part is None for part in parts):
            raise TaskError(NO_GRADIENT)
        finite = 0 < weight < math.inf and self._finish(weight * self._scaler.scale)
        return Met(loss_sum, weight, finite, int(asked))

    def _release(self) -> None:
        """Do nothing: no other member reads these gradients."""

    def _finish(self, divisor: float) -> bool:
        grads = self._local_grads()
        finite = not grads or gradients.finish_(grads, divisor)
        return self._peers.sum([float(not finite)])[0] == 0

    def _clip(self) -> None:
        clip, grads = self._numerics.clip, self._local_grads()
        if clip.norm is not None:
            norm = self._shards.sum([square_sum(grads)])[0] ** 0.5
            if (factor := gradients.clip_factor(norm, clip.norm)) < 1 and grads:
                torch._foreach_mul_(grads, factor)
        elif clip.value is not None:
            gradients.clip_value_(grads, clip.value)

    def _local_grads(self) -> list[Tensor]:
        found = [piece.local.grad for piece in self._held()]
        return [grad for grad in found if grad is not None and grad.numel()]

    def _everywhere_seen(self, seen: bytearray) -> list[bool]:
        """Return for each parameter whether any member had a gradient."""
        if not self._peers.sum([float(not all(seen))])[0]:
            return [True] * len(seen)
        counts = torch.tensor(list(seen), dtype=torch.int64)
        self._peers.sum_(counts)
        return [count > 0 for count in counts.tolist()]

    def _spoilt(self) -> list[int]:
        """Return the numbers of the parameters whose gradient is not finite in some part."""
        grads = [piece.local.grad for piece in self._held()]
        found = [grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads]
        counts = torch.tensor(found, dtype=torch.int64)
        self._peers.sum_(counts)
        return [at for at, count in enumerate(counts.tolist()) if count]

    def _inspect(self, inspector: Inspector) -> None:
        """Inspect norms in place of tensors: an inspector looks at norms only, and that of a tensor
        in parts is a sum over the members."""
        held = [piece for piece in self._held() if piece.local.grad is not None]
        weights = self._norms([piece.local for piece in held])
        grads = self._norms([piece.local.grad for piece in held if piece.local.grad is not None])
        names = [piece.name for piece in held]
        inspector.inspect(
            self.version + 1,
            dict(zip(names, weights, strict=True)),
            dict(zip(names, grads, strict=True)),
        )

    def _norms(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        squares = torch.tensor([square_sum([part]) for part in parts], dtype=torch.float64)
        self._shards.sum_(squares)
        norms: tuple[Tensor, ...] = squares.sqrt_().split(1)
        return norms

    def _clear(self) -> None:
        super()._clear()
        for piece in self._held():
            piece.local.grad = None


class GradientsLevel(Divided, OptimizerLevel):
    """Level `gradients`: every backward pass ends with its gradients at their owners."""

    def _join(self) -> None:
        self._divide()
        self._reduction = Reduction(self._peers, self._parameters, self._slabs)
        self._hooks = self._reduction.hooks

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        stats = super().compute(micro, backward=backward)
        if backward and not self._lockstep:
            for _ in range(len(micro), self._numerics.micro):
                self._reduction.flush()  # another member may have one more pass
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
        # `explain` looks at the gradients of complete parameters: mark the non-finite ones there.
        for at in self._spoilt():
            parameter = self._parameters[at]
            parameter.grad = parameter.new_full((), torch.nan).expand_as(parameter)
        return super()._explain()

    def _clear(self) -> None:
        super()._clear()
        self._reduction.clear()
