"""What is done to gradients that are divided: each member looks at its part, all agree."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.comm.buckets import square_sum
from echelon.comm.interface import Collective
from echelon.core.errors import TaskError
from echelon.core.interfaces import Inspector
from echelon.optim import gradients
from echelon.strategy.sharded.pieces import Piece
from echelon.strategy.synchronous import NO_GRADIENT, Met, Synchronous


class Divided(Synchronous):
    """To be mixed in before the strategy whose gradients are whole."""

    alone = False
    _peers: Collective
    """All members."""
    _shards: Collective
    """Those that hold one model between them."""

    def held(self) -> tuple[int, int] | None:
        return self._shards.index, self._shards.count

    def lend(self, holders: Collective) -> None:
        self._shards = holders

    @abstractmethod
    def _held(self) -> list[Piece]:
        """This member's pieces, one for each trained parameter."""

    @abstractmethod
    def _parts(self) -> list[Tensor | None]:
        """The summed gradients of the pieces; None where no member had one."""

    def _known(self) -> None:
        """Sums are exchanged in `_meet`."""

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
        """Nobody else reads these gradients."""

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
        """Which parameters any member had a gradient for."""
        if not self._peers.sum([float(not all(seen))])[0]:
            return [True] * len(seen)
        counts = torch.tensor(list(seen), dtype=torch.int64)
        self._peers.sum_(counts)
        return [count > 0 for count in counts.tolist()]

    def _spoilt(self) -> list[int]:
        """Which parameters have a gradient that is not finite, in whosever part."""
        grads = [piece.local.grad for piece in self._held()]
        found = [grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads]
        counts = torch.tensor(found, dtype=torch.int64)
        self._peers.sum_(counts)
        return [at for at, count in enumerate(counts.tolist()) if count]

    def _inspect(self, inspector: Inspector) -> None:
        """A single value, the norm of the whole, stands for tensors that lie in parts."""
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
