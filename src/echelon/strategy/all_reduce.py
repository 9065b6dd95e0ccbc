"""All-reduce: every member has the whole model and a part of the batch; gradients are summed.

    member 0   forward ─ backward ─┬ bucket ┬ bucket ┐
    member 1   forward ─ backward ─┴ bucket ┴ bucket ┴─▶ Σ grad / Σ weight ─▶ the same step

A bucket is summed as soon as backward has filled it, while backward goes on with the layers before.
Members with fewer micro-batches than others pad them if batch norm needs all members in every pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.comm.group import Group
from echelon.comm.interface import Collective
from echelon.core.errors import ConfigError, TaskError, unknown
from echelon.core.types import Ask, Batch, Shard, Stats
from echelon.optim import gradients
from echelon.optim.step import reads_gradients_only
from echelon.strategy.balance import Pace, shares
from echelon.strategy.base import NO_GRADIENT, Met, Synchronous
from echelon.strategy.batch_norm import (
    Pad,
    Padding,
    attend,
    looks_in_evaluation,
    synchronise,
    unsynchronise,
)
from echelon.strategy.diagnose import agree, blame

EARLY = 1 << 20
"""Bytes of gradients from which on they are submitted during backward; below, after it."""


class AllReduce(Synchronous):
    """Data parallelism over all members: the model is replicated, batches are divided."""

    alone = True
    _comm: Group
    _absent = False
    """Whether batch norm currently ignores this member's samples."""
    _meets = False
    """Whether batch norm sums over all members in evaluation, too."""
    _hooks: Sequence[RemovableHandle] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pace = Pace()
        self._balanced = False

    def _place(self) -> None:
        self._meet_members()
        make_alike(self.model, self._peers, self._parallel.sync.skip_init)

    def _meet_members(self) -> None:
        self.shard = Shard(self._comm.index, self._comm.count)
        self._peers: Collective = self._comm.collective(device=self._numerics.device)
        self._meet_in_layers()

    def _meet_in_layers(self) -> None:
        """Let batch norm see the samples of all members that share a batch, if the job says so."""
        self._lockstep = self._meets = False
        if self._peers.count > 1 and self._parallel.sync.batch_norm == "synchronised":
            self._lockstep = synchronise(self.model, self._peers, always=True)
            self._meets = looks_in_evaluation(self.model)

    def _join(self) -> None:
        self._balanced = self._parallel.balance and self._comm.elastic and self.alone
        size = sum(p.numel() * p.element_size() for p in self._parameters)
        self._early = size >= EARLY
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, at))
            for at, parameter in enumerate(self._parameters if self._early else ())
        ]
        self._meet_gradients()

    def _meet_gradients(self) -> None:
        self._sum = self._peers.gradients(self._parameters)
        self._open = False
        self._given = [False] * len(self._parameters)
        self._own: list[Tensor] | None = None
        optimizer = self._stepper.optimizer
        changed = optimizer._optimizer_step_pre_hooks or not reads_gradients_only(optimizer)
        if self._sum.shared and changed:
            self._own = [torch.empty_like(result) for result in self._sum.results]

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        if self._absent:
            self._attend(present=True)
        if self._meets and not backward:
            return self._evaluate_together(micro)
        if self._lockstep and backward:
            # All members must make the same number of passes, because batch norm sums in each.
            micro = [*micro, *self._padding.pads(micro, self._numerics.micro)]
        self._pace.begin()
        return super().compute(micro, backward=backward)

    def _known(self) -> None:
        scale = self._scaler.scale
        loss_sum, asked = self._loss_sum.item(), self._comm.asked
        row = [self._weight * scale, self._weight, loss_sum, asked, self._pace.last]
        self._sum.begin(row)
        self._open = True

    def _ready(self, at: int, parameter: Tensor) -> None:
        """Submit a parameter's gradient. Called by backward; final in the last micro-batch only."""
        if self._open and parameter.grad is not None:
            if self._given[at]:
                raise TaskError(came_twice(self._names[at]))
            self._sum.put(at, parameter.grad)
            self._given[at] = True
            parameter.grad = None

    def _meet(self) -> Met:
        self._hand_over()
        self._pace.end(self._weight)
        sums = self._sum.finish()
        results = self._sum.results
        if self._own is not None:
            torch._foreach_copy_(self._own, results)
            results = self._own
        for parameter, result in zip(self._parameters, results, strict=True):
            parameter.grad = result
        for at in sums.missing:
            self._parameters[at].grad = None
        if len(sums.missing) == len(self._parameters):
            raise TaskError(NO_GRADIENT)
        _, weight, loss_sum, asked, seconds = sums.row
        if self._pace.compare(seconds / self._peers.count) and self._balanced:
            self._comm.asked |= Ask.BALANCE
        return Met(loss_sum, weight, sums.finite, int(asked))

    def _hand_over(self) -> None:
        """Submit the gradients that backward did not submit itself."""
        self._open = False
        if not any(self._given):
            self._sum.put_all([p.grad for p in self._parameters])
            return
        for at, (given, parameter) in enumerate(zip(self._given, self._parameters, strict=True)):
            if not given and parameter.grad is not None:
                self._sum.put(at, parameter.grad)
        self._given = [False] * len(self._parameters)

    def _clip(self) -> None:
        clip = self._numerics.clip
        if self._own is not None:
            super()._clip()
        elif clip.norm is not None:
            norm = self._sum.norm()
            if (factor := gradients.clip_factor(norm, clip.norm)) < 1:
                self._sum.scale_(factor)
        elif clip.value is not None:
            self._sum.clamp_(clip.value)

    def _applied(self) -> None:
        self._release()

    def _release(self) -> None:
        """Note that this member has read the gradients."""
        self._sum.release()

    def _loss_of(self, batch: Batch) -> tuple[Tensor, float]:
        if not isinstance(batch, Pad):
            return super()._loss_of(batch)
        self._attend(present=False)
        loss_sum, _ = super()._loss_of(batch)
        return loss_sum * 0.0, 0.0

    def _evaluate(self, micro: Sequence[Batch]) -> Stats:
        self._share_buffers()
        return super()._evaluate(micro)

    def _share_buffers(self) -> None:
        """Copy member 0's moving buffers to all, so that all evaluate the same model."""
        if self.model.training and self._buffers:
            self._find_buffers()
            self._peers.broadcast_(self._buffers)

    def _evaluate_together(self, micro: Sequence[Batch]) -> Stats:
        pads = self._padding.pads(micro, self._padding.most(len(micro)))
        stats = super().compute(micro, backward=False)
        self._attend(present=False)
        with torch.inference_mode(), self._autocast():
            for batch in pads:
                self._forward(self.model, batch)
        self._attend(present=True)
        return stats

    @functools.cached_property
    def _padding(self) -> Padding:
        return Padding(self._peers, self._numerics.device)

    def _attend(self, *, present: bool) -> None:
        self._absent = not present
        attend(self.model, present)

    def total(self, stats: Stats) -> Stats:
        return total(self._peers, stats, list(self._metrics))

    def rejoin(self) -> None:
        """Connect to the members of a new generation.

        The weights stay as they are: outdated members receive those of others afterwards.
        """
        assert self.settle(), "members meet between two steps only"
        unsynchronise(self.model)
        self.__dict__.pop("_padding", None)
        self._absent = False
        self._meet_members()
        self._meet_gradients()
        self._pace.begin_anew()

    def balance(self) -> Sequence[float]:
        parts = shares(self._peers, self._pace.speed)
        self.shard = Shard(self.shard.index, self.shard.count, tuple(parts))
        self._comm.asked &= ~Ask.BALANCE
        self._pace.divided()
        return parts

    def _explain(self) -> str:
        """Return the explanation of the member nearest to the cause.

        Every member investigates alone, so batch norm must not wait for the others.
        """
        unsynchronise(self.model)
        words = super()._explain()
        if self._lockstep:
            synchronise(self.model, self._peers, always=True)
        return agree(self._peers, words, blame(self._micro, self._loss_sum))

    def let_go(self) -> None:
        unsynchronise(self.model)
        for hook in self._hooks:
            hook.remove()
        super().let_go()


def came_twice(name: str) -> str:
    return (
        f"the gradient of {name!r} came in several parts, as if its layer were used twice under "
        f"checkpoint(use_reentrant=True): give it use_reentrant=False"
    )


# The same start: all members begin with member 0's weights


@torch.no_grad()
def make_alike(model: nn.Module, collective: Collective, skip: Sequence[str]) -> None:
    """Copy parameters and buffers from the first member, except those that match `skip`."""
    names: dict[Tensor, list[str]] = {}  # a tied tensor has several
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        names.setdefault(tensor, []).append(name)
    known = list(chain.from_iterable(names.values()))
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ConfigError(
                unknown("sync.skip_init: parameter", pattern, known), ("sync", "skip_init")
            )
    chosen = [
        tensor.detach()
        for tensor, its in names.items()
        if tensor.numel() and not left_alone(its, skip)
    ]
    collective.broadcast_(chosen)


def left_alone(names: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns in `skip`."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in skip)]


# Evaluation: sums over all members


_DIMS = 6
"""Dimensions that a metric may have at most."""
_KINDS = (torch.float64, torch.float32, torch.int64)


def total(collective: Collective, stats: Stats, names: Sequence[str]) -> Stats:
    """Sum `stats` over all members.

    A member without samples has no metrics, so all members first exchange the metrics' shapes.
    """
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
    """Describe a metric by [1, dtype, dimensions, sizes…], or by zeros if there is none.

    In the sum over all members, the first number is how many members described it.
    """
    if part is None:
        return [0] * (3 + _DIMS)
    assert part.ndim <= _DIMS, f"a metric of {part.ndim} dimensions"
    sizes = [*part.shape, *[0] * (_DIMS - part.ndim)]
    return [1, _KINDS.index(_kind(part)), part.ndim, *sizes]


def _summed(collective: Collective, part: Tensor | None, shape: list[int]) -> Tensor:
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
