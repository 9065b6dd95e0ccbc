"""Tensor parallelism: the members of a team compute the planned layers together.

Teams share the batch among them, as single members do with all-reduce.

    data axis     team 0: members 0 1 │ team 1: members 2 3
    gradients     summed between 0 and 2, and between 1 and 3: those that hold the same parts

`plan.py` says which linear layers are cut and how, `layers.py` cuts them and computes with parts.
Checkpoints hold complete tensors, so they do not depend on the number of members.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from echelon.comm.buckets import square_sum
from echelon.comm.interface import Collective
from echelon.core.errors import ConfigError
from echelon.core.interfaces import Comm, Inspector, Task
from echelon.core.types import Shard
from echelon.optim import gradients
from echelon.strategy.all_reduce import AllReduce, make_alike
from echelon.strategy.base import Met, as_factory
from echelon.strategy.batch_norm import synchronise, unsynchronise
from echelon.strategy.diagnose import agree, blame, explain_together
from echelon.strategy.optimizer_shards import check_divisible, lengths, own_state, whole_state
from echelon.strategy.tensor.layers import Cut, Team, agree_on_chance, cut_model, gathered, restore
from echelon.strategy.tensor.plan import planned, unchanged


class TensorParallel(AllReduce):
    """All-reduce between teams, whose members each hold a part of the cut layers.

    A team of one member has nothing to cut.
    """

    alone = False

    def setup(self, task: Task, comm: Comm) -> None:
        super().setup(task if comm.count == 1 else as_factory(task), comm)

    def _place(self) -> None:
        device, comm = self._numerics.device, self._comm
        data, along = lengths(self._parallel, "tensor", comm.count)
        team, place = divmod(comm.index, along)
        self.shard = Shard(team, data)
        self._everybody: Collective = comm.collective(device=device)
        make_alike(self.model, self._everybody, self._parallel.sync.skip_init)
        self._peers = comm.collective(range(place, comm.count, along), device=device)
        self._team = comm.collective(range(team * along, (team + 1) * along), device=device)
        self._meet_in_layers()
        self._cuts: list[Cut] = self._cut() if along > 1 else []
        self.whole = not self._cuts

    def _cut(self) -> list[Cut]:
        if self._numerics.compile:
            raise ConfigError(
                "compile: true has no effect on layers that several members compute together: "
                "leave it out with strategy tensor",
                ("compile",),
            )
        chance = agree_on_chance(self._team, self._numerics.device)
        team, wishes = Team(self._team, chance), self._parallel.tensor.plan
        if not wishes:
            return cut_model(self.model, planned(self.model, wishes), team)
        with unchanged(self._task, self.model, self._numerics.device):
            return cut_model(self.model, planned(self.model, wishes), team)

    def _join(self) -> None:
        if self._cuts:
            check_divisible(self._stepper.optimizer)
        super()._join()
        names = {cut.name for cut in self._cuts}
        self._is_cut = [name in names for name in self._names]

    def size(self) -> int:
        wholes = {cut.name: cut.shape.numel() for cut in self._cuts}
        return sum(wholes.get(name, p.numel()) for name, p in self.model.named_parameters())

    def _meet(self) -> Met:
        met = super()._meet()
        bad = not (met.finite and math.isfinite(met.loss_sum))
        others_bad, asked = self._team.sum([float(bad), met.asked])
        return met._replace(finite=others_bad == 0, asked=int(asked))

    def _clip(self) -> None:
        clip = self._numerics.clip
        if clip.norm is None:
            super()._clip()
        elif (factor := gradients.clip_factor(self._norm(), clip.norm)) < 1:
            if self._own is None:
                self._sum.scale_(factor)
            else:
                torch._foreach_mul_(self._own, factor)

    def _norm(self) -> float:
        """Return the norm of the complete gradient: parts are added over the team, what all members
        hold is counted once."""
        pairs = [(p.grad, cut) for p, cut in zip(self._parameters, self._is_cut, strict=True)]
        parts = [grad for grad, cut in pairs if cut and grad is not None]
        alike = [grad for grad, cut in pairs if not cut and grad is not None]
        once = square_sum(alike) if self._team.index == 0 else 0.0
        return math.sqrt(self._team.sum([square_sum(parts) + once])[0])

    def _inspect(self, inspector: Inspector) -> None:
        """Inspect norms in place of tensors: an inspector looks at norms only, and that of a tensor
        in parts is a sum over the team."""
        held = [
            (name, cut, p.detach(), p.grad)
            for name, cut, p in zip(self._names, self._is_cut, self._parameters, strict=True)
            if p.grad is not None
        ]
        names = [name for name, *_ in held]
        weights = self._norms([(cut, weight) for _, cut, weight, _ in held])
        grads = self._norms([(cut, grad) for _, cut, _, grad in held])
        weights_by_name = dict(zip(names, weights, strict=True))
        inspector.inspect(self.version + 1, weights_by_name, dict(zip(names, grads, strict=True)))

    def _norms(self, held: Sequence[tuple[bool, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        mine = [square_sum([t]) if cut or self._team.index == 0 else 0.0 for cut, t in held]
        squares = torch.tensor(mine, dtype=torch.float64)
        self._team.sum_(squares)
        norms: tuple[torch.Tensor, ...] = squares.sqrt_().split(1)
        return norms

    def _explain(self) -> str:
        """Return the explanation of the member nearest to the cause.

        Every team investigates alone, so batch norm must not wait for other teams.
        """
        unsynchronise(self.model)
        words = explain_together(
            self.model, self._forward, self._micro, self._loss_sum, self.version, self._spoilt()
        )
        if self._lockstep:
            synchronise(self.model, self._peers, always=True)
        return agree(self._everybody, words, blame(self._micro, self._loss_sum))

    def _spoilt(self) -> list[str]:
        """Return the parameters with a gradient that is not finite on some member."""
        grads = [p.grad for p in self._parameters]
        found = [grad is not None and not bool(torch.isfinite(grad).all()) for grad in grads]
        counts = torch.tensor(found, dtype=torch.int64)
        self._everybody.sum_(counts)
        return [name for name, bad in zip(self._names, counts.tolist(), strict=True) if bad]

    def _weights(self) -> dict[str, torch.Tensor]:
        weights = super()._weights()
        parts = [weights[cut.name] for cut in self._cuts]
        wholes = gathered(self._cuts, parts, self._team)
        return weights | {cut.name: whole for cut, whole in zip(self._cuts, wholes, strict=True)}

    def _load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        fitting = [cut for cut in self._cuts if cut.name in weights]
        index = self._team.index
        parts = {cut.name: cut.cut(weights[cut.name], index, what=cut.name) for cut in fitting}
        super()._load_weights(weights | parts)

    def _optimizer_state(self) -> dict[str, Any]:
        return whole_state(super()._optimizer_state(), self._cuts, self._team, gathered)

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        super()._load_optimizer_state(own_state(state, self._cuts, self._team.index))

    def let_go(self) -> None:
        restore(self.model)
        super().let_go()
