"""Sharded data parallelism at level `parameters`: weights are complete only while they are used.

All members go through the same layers at the same time, because each layer gathers its weights
there and sums its gradients there. torch's `fully_shard` does both (`fsdp.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.interface import Collective
from echelon.core.errors import CheckpointError
from echelon.core.interfaces import Comm, Task
from echelon.core.types import Batch
from echelon.optim import Stepper
from echelon.strategy.all_reduce import AllReduce
from echelon.strategy.base import as_factory
from echelon.strategy.batch_norm import Pad
from echelon.strategy.diagnose import agree, blame, explain_together
from echelon.strategy.model import unmoved
from echelon.strategy.optimizer_shards import (
    Piece,
    divide,
    gathered,
    lengths,
    own_state,
    sharded_group,
    whole_state,
)
from echelon.strategy.sharded import fsdp
from echelon.strategy.sharded.fsdp import first_samples, used_outside
from echelon.strategy.sharded.slabs import give_back_large
from echelon.strategy.sharded.strategy import Divided


class ParametersLevel(Divided, AllReduce):
    """Level `parameters`: torch's `fully_shard`, with gradients that are sums.

    A single member has nothing to divide.
    """

    def setup(self, task: Task, comm: Comm) -> None:
        super().setup(task if comm.count == 1 else as_factory(task), comm)

    def _place(self) -> None:
        give_back_large()
        super()._place()
        device = self._numerics.device
        self._shards: Collective = sharded_group(self._comm, self._peers, self._parallel, device)
        self._seen_names: set[str] = set()
        self._forward = functools.partial(_go_forward, self._task.forward)
        self._sees_all, self._lockstep = self._lockstep, self._peers.count > 1
        self._meets, self.whole = self._lockstep, not self._lockstep
        if self.whole:
            return
        data, along = lengths(self._parallel, "sharded", self._comm.count)
        axes = {"sharded": along} if data == 1 else {"data": data, "sharded": along}
        mesh = self._comm.mesh(axes, device=device)
        own = self._shards if device.type == "cpu" else None
        fsdp.shard(self.model, self._units(device), mesh, own)
        fsdp.watch(self.model, self._seen_names.add)

    def _units(self, device: torch.device) -> list[nn.Module]:
        """Return the parts to gather one by one: those whose weights no other layer uses, as far as
        the first samples show."""
        parts = fsdp.units(self.model)
        samples = first_samples(self._task, device)
        if samples is None:
            return parts
        with self._autocast():
            outside = used_outside(self.model, parts, lambda: self._forward(self.model, samples))
        found = torch.tensor([part in outside for part in parts], dtype=torch.int64)
        self._peers.sum_(found)
        return [part for part, times in zip(parts, found.tolist(), strict=True) if not times]

    def _join(self) -> None:
        named = list(self.model.named_parameters())
        pieces = fsdp.pieces(named, self._shards)
        self._pieces: dict[Tensor, Piece] = {
            parameter: piece for (_, parameter), piece in zip(named, pieces, strict=True)
        }
        optimizer = self._stepper.optimizer
        divide(optimizer, self._pieces, self._shards.index)
        self._trained = [self._pieces[parameter] for parameter in self._parameters]
        held = self._pieces.values()
        self._stepper = Stepper(optimizer, [(piece.name, piece.local) for piece in held])

    def _loss_of(self, batch: Batch) -> tuple[Tensor, float]:
        if self._sees_all or not isinstance(batch, Pad):
            return super()._loss_of(batch)
        with unmoved(self._buffer_homes):
            return super()._loss_of(batch)

    def _held(self) -> list[Piece]:
        return self._trained

    def _parts(self) -> list[Tensor | None]:
        grads = [None if p.grad is None else fsdp.local(p.grad) for p in self._parameters]
        if not self._lockstep:
            return grads
        seen = self._everywhere_seen(bytearray(name in self._seen_names for name in self._names))
        return [grad if used else None for grad, used in zip(grads, seen, strict=True)]

    def _explain(self) -> str:
        spoilt = [self._names[at] for at in self._spoilt()]
        words = explain_together(
            self.model, self._forward, self._micro, self._loss_sum, self.version, spoilt
        )
        return agree(self._peers, words, blame(self._micro, self._loss_sum))

    def _clear(self) -> None:
        super()._clear()
        self._seen_names.clear()

    def _weights(self) -> dict[str, Tensor]:
        pieces = list(self._pieces.values())
        wholes = gathered(pieces, [piece.local for piece in pieces], self._shards)
        found: dict[str, Tensor] = {}
        for piece, whole in zip(pieces, wholes, strict=True):
            if self._shards.index == 0:
                found[piece.name] = whole
        named = self.model.state_dict(keep_vars=True)
        return {
            name: found[self._pieces[value].name] if value in self._pieces else value
            for name, value in named.items()
            if self._shards.index == 0 or value not in self._pieces
        }

    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        mine = self.model.state_dict(keep_vars=True)
        _check_fits(mine, weights)
        with torch.no_grad():
            for name, value in mine.items():
                piece, whole = self._pieces.get(value), weights[name]
                if piece is None:
                    value.copy_(whole)
                else:
                    piece.local.copy_(piece.cut(whole, self._shards.index, what=name))

    def _optimizer_state(self) -> dict[str, Any]:
        return whole_state(super()._optimizer_state(), self._trained, self._shards, gathered)

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        super()._load_optimizer_state(own_state(state, self._trained, self._shards.index))


def _go_forward(forward: Callable[[nn.Module, Batch], Any], model: nn.Module, batch: Batch) -> Any:
    """Call `forward`, replacing inference mode by no_grad.

    Weights that were first gathered in inference mode could never be trained.
    """
    if not torch.is_inference_mode_enabled():
        return forward(model, batch)
    with torch.inference_mode(False), torch.no_grad():
        return forward(model, batch)


def _check_fits(mine: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    if odd := sorted(mine.keys() ^ weights.keys()):
        raise CheckpointError(f"the checkpoint does not fit the model: {odd[0]!r} is in one only")
    for name, value in mine.items():
        if value.shape != weights[name].shape:
            raise CheckpointError(
                f"the checkpoint does not fit the model: {name!r} is {tuple(value.shape)}, "
                f"saved was {tuple(weights[name].shape)}"
            )
