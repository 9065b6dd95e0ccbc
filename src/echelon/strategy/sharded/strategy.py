"""Levels optimizer, gradients, parameters."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.buckets import square_sum
from echelon.comm.interface import Collective
from echelon.core.errors import CheckpointError, TaskError
from echelon.core.interfaces import Comm, Inspector, Task
from echelon.core.types import Batch, Stats
from echelon.optim import Stepper, gradients
from echelon.strategy.all_reduce import AllReduce
from echelon.strategy.base import NO_GRADIENT, Met, Synchronous, as_factory
from echelon.strategy.batch_norm import Pad
from echelon.strategy.diagnose import agree, blame, explain_together
from echelon.strategy.model import unmoved
from echelon.strategy.optimizer_shards import (
    Piece,
    divide,
    gathered,
    in_row,
    lengths,
    own_state,
    sharded_group,
    whole_state,
)
from echelon.strategy.sharded import fsdp
from echelon.strategy.sharded.fsdp import first_samples, give_back_large, used_outside
from echelon.strategy.sharded.slabs import Reduction, Slabs

# --- divided ---
# What is done to gradients that are divided: each member looks at its part, all agree.


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


# --- optimizer_level ---
# Level `optimizer`: weights and gradients whole everywhere, the optimizer's state divided.
#
# all_reduce's gradients ─▶ each member steps its slices ─▶ slices to all


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


# --- gradients_level ---
# Level `gradients`: weights whole everywhere, gradients and the optimizer's state divided.


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


# --- parameters_level ---
# Level `parameters`: everything is divided; weights are whole only where they are computed with.
#
# All members go through the same layers at the same time, for there they gather weights.


class ParametersLevel(Divided, AllReduce):
    """torch's fully_shard, with gradients that are sums. One member alone has nothing to divide."""

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
        """Whose weights nobody uses but they themselves, as far as the first samples show it."""
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
    """Weights that were first gathered in inference mode could never be trained with."""
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
