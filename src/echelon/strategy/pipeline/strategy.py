"""Every member has a stage, a few consecutive layers, and the batch goes through in pieces.

    replica 0   member 0: stage 0 ─▶ member 1: stage 1 ─▶ …       along the pipeline axis
    replica 1   member P: stage 0 ─▶ member P+1: stage 1 ─▶ …     other samples: the data axis

All members of a replica are given the same batch; the first stage reads its input, the last one
computes loss and metrics. Gradients are Σ grad / Σ weight over all micro-batches and replicas.

Batch norm sees one micro-batch at a time, as in one process that accumulates as many. Replicas take
theirs together, unless `sync.batch_norm` is local; the running figures are then those of replica 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import TaskError
from echelon.core.interfaces import Inspector
from echelon.core.types import Batch, Stats
from echelon.data.batch import emptied, size
from echelon.optim import gradients
from echelon.strategy.batch_norm import synchronise, unsynchronise
from echelon.strategy.pair import as_pair
from echelon.strategy.pipeline.decide import first_samples
from echelon.strategy.pipeline.entrance import entrance
from echelon.strategy.pipeline.fault import explain
from echelon.strategy.pipeline.norms import all_norms
from echelon.strategy.pipeline.pieces import how_many, pieces
from echelon.strategy.pipeline.plan import forward_plan, plan
from echelon.strategy.pipeline.runner import End
from echelon.strategy.pipeline.seen import Seen
from echelon.strategy.pipeline.staged import Staged
from echelon.strategy.synchronous import NO_GRADIENT, Met
from echelon.strategy.totals import total


class Pipeline(Staged):
    """The members of the `pipeline` axis, and replicas of them along the `data` axis."""

    _empty: Batch | None = None

    def compute(self, micro: Sequence[Batch], *, backward: bool = True) -> Stats:
        if self._places == 1:
            cut = [piece for part in self._cut_up(micro, backward) for piece in part]
            return super().compute(cut, backward=backward)
        self._comm.pulse(self.version + 1, "computing" if backward else "evaluating")
        if not backward:
            return self._evaluate(micro)
        if not self.model.training:
            self.model.train()
        if self._buffers:
            self._keep_buffers()
        self._micro, self._loss_sum, self._weight = micro, torch.zeros(()), 0.0
        for at, part in enumerate(self._cut_up(micro, backward)):
            with self._draws.during(self.version, self._replica, at):
                self._learn(part)
        return Stats(self._loss_sum, self._weight, {})

    def total(self, stats: Stats) -> Stats:
        return total(self._world, stats, list(self._metrics))

    def _cut_up(self, micro: Sequence[Batch], learning: bool) -> list[list[Batch]]:
        """Each batch in micro-batches."""
        if learning and self._lockstep:
            return self._cut_alike(micro)
        sizes = [size(batch) for batch in micro]
        pairs = zip(micro, sizes, strict=True)
        return [pieces(batch, self._how_many(samples)) for batch, samples in pairs]

    def _cut_alike(self, micro: Sequence[Batch]) -> list[list[Batch]]:
        """As many pieces in every replica, if need be empty ones: batch norm sums over them all."""
        missing = self._numerics.micro - len(micro)
        padded = [*micro, *[self._nothing()] * missing] if missing > 0 else micro
        sizes = torch.tensor([size(batch) for batch in padded])
        self._replicas.sum_(sizes)
        pairs = [(b, total) for b, total in zip(padded, sizes.tolist(), strict=True) if total]
        return [pieces(b, self._how_many(total // self.shard.count)) for b, total in pairs]

    def _nothing(self) -> Batch:
        if self._empty is None:
            self._empty = emptied(first_samples(self._task, 1, self._numerics.device))
        return self._empty

    def _how_many(self, samples: int) -> int:
        return how_many(samples, self._places, self._parallel.pipeline.micro)

    def _learn(self, micro: Sequence[Batch]) -> None:
        schedule = self._parallel.pipeline.schedule
        steps = plan(schedule, self._places, self._stage_count, len(micro))[self._at]
        self._runner.run(steps, micro, self._enter, self._end, learning=True)

    def _look(self, micro: Sequence[Batch], end: End) -> None:
        steps = forward_plan(self._places, self._stage_count, len(micro))[self._at]
        self._runner.run(steps, micro, self._enter, end, learning=False)

    def _enter(self, batch: Batch) -> Any:
        return entrance(self._forward, batch)

    def _end(self, output: Any, batch: Batch) -> Tensor:
        with self._autocast():
            loss_sum, weight = as_pair(self._loss(output, batch))
        self._loss_sum = self._loss_sum + loss_sum.detach()
        self._weight += weight
        scale = self._scaler.scale
        return loss_sum if scale == 1.0 else loss_sum * scale

    @torch.inference_mode()
    def _evaluate(self, micro: Sequence[Batch]) -> Stats:
        if self._places == 1:
            return super()._evaluate(micro)
        if self.model.training:
            self.model.eval()
        seen = Seen(self._metrics)

        def end(output: Any, batch: Batch) -> Tensor:
            with self._autocast():
                loss_sum, weight = as_pair(self._loss(output, batch))
            seen.add(loss_sum, weight, output, batch)
            return loss_sum

        for part in self._cut_up(micro, learning=False):
            self._look(part, end)
        return Stats(seen.loss_sum, seen.weight, seen.totals)

    def _meet(self) -> Met:
        for shared in self._shared:
            shared.sum()
        grads = self._grads()
        loss_sum, weight, asked, some = self._world.sum(
            [self._loss_sum.item(), self._weight, self._comm.asked, len(grads)]
        )
        if not some:
            raise TaskError(NO_GRADIENT)
        self._met_loss = loss_sum
        good = 0 < weight < math.inf and gradients.finish_(grads, weight * self._scaler.scale)
        (bad,) = self._world.sum([float(not good)])
        return Met(loss_sum, weight, not bad, int(asked))

    def _clip(self) -> None:
        clip, grads = self._numerics.clip, self._grads()
        if clip.norm is not None:
            mine = [p.grad for p in self._firsts().values() if p.grad is not None]
            (squares,) = self._world.sum([float(gradients.global_norm(mine)) ** 2])
            if (factor := gradients.clip_factor(squares**0.5, clip.norm)) < 1 and grads:
                torch._foreach_mul_(grads, factor)
        elif clip.value is not None:
            gradients.clip_value_(grads, clip.value)

    def _firsts(self) -> dict[str, nn.Parameter]:
        """The parameters that are this member's to count, where several hold the same."""
        pairs = [] if self._replica else zip(self._names, self._parameters, strict=True)
        return {name: p for name, p in pairs if self._holders[p][0] == self._at}

    def _inspect(self, inspector: Inspector) -> None:
        """Everybody's layers: whoever is told of them sits at member 0."""
        weights, grads = all_norms(self._world, self._all_names, self._firsts())
        inspector.inspect(self.version + 1, weights, grads)

    def _applied(self) -> None:
        factor = self._schedule.factor(self.version)
        for group in self._own_optimizer.param_groups:
            if not group["params"]:  # nothing of it is here, and so nobody has set its rate
                group["lr"] = group["initial_lr"] * factor
        if self._buffers and self._replicas.count > 1:
            self._replicas.broadcast_([held[name] for held, name in self._buffer_homes])

    def _explain(self) -> str:
        """Each replica looks for itself, so without layers that wait for the others."""
        unsynchronise(self.model)
        words = explain(self._world, self.model, self._again, self._micro, self._met_loss)
        if self._lockstep:
            synchronise(self.model, self._replicas)
        return f"step {self.version + 1}: {words}"

    def _again(self, model: nn.Module, batch: Batch) -> Any:
        if self._places == 1:
            return self._forward(model, batch)
        return self._look(pieces(batch, self._how_many(size(batch))), lambda output, _: output)
