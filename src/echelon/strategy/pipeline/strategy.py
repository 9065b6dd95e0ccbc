"""The pipeline strategy: every member has a stage, and a batch goes through in micro-batches.

    replica 0   member 0: stage 0 ─▶ member 1: stage 1 ─▶ …       along the pipeline axis
    replica 1   member P: stage 0 ─▶ member P+1: stage 1 ─▶ …     other samples: the data axis

All members of a replica are given the same batch; the first stage reads its input, the last one
computes loss and metrics. Gradients are Σ grad / Σ weight over all micro-batches and replicas.

Batch norm sees one micro-batch at a time, as in one process that accumulates as many. Replicas
share its statistics. If `sync.batch_norm` is local, the running statistics are those of replica 0.

`partition.py` decides on the stages, `schedule.py` on the order of steps, and `runner.py` takes the
steps. `Staged` builds this member's stages and its part of the optimizer; `Pipeline` computes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.comm.interface import Collective
from echelon.core.errors import ConfigError, TaskError
from echelon.core.interfaces import Comm, Inspector, Metric, Task
from echelon.core.types import Batch, Shard, Stats
from echelon.data.batch import emptied, size
from echelon.optim import gradients
from echelon.strategy.all_reduce import total
from echelon.strategy.base import NO_GRADIENT, Met, Synchronous, as_factory, as_pair
from echelon.strategy.batch_norm import synchronise, unsynchronise
from echelon.strategy.diagnose import explain_stage
from echelon.strategy.model import trainable
from echelon.strategy.pipeline.holders import (
    Places,
    SharedGradients,
    all_norms,
    by_dtype,
    find_holders,
    make_alike,
    make_meta,
)
from echelon.strategy.pipeline.line import Line
from echelon.strategy.pipeline.partition import decide, entrance, first_samples
from echelon.strategy.pipeline.runner import End, Runner
from echelon.strategy.pipeline.schedule import forward_plan, how_many, pieces, plan, usual
from echelon.strategy.pipeline.stage import Draws, Stage
from echelon.strategy.pipeline.state import Part, gather, options_of, without_elsewhere


class Staged(Synchronous):
    """The stages of a member, and the part of the optimizer that goes with them.

    The member is number `replica · places + place` in a mesh with the axes `data` and `pipeline`.
    It builds the complete model, so that all members know its names and shapes, and then moves the
    layers of others to the meta device. Checkpoints are complete: put together on saving, taken
    apart on loading.
    """

    _comm: Group

    def setup(self, task: Task, comm: Comm) -> None:
        mesh = self._parallel.mesh
        self._places = mesh.get("pipeline", 1) if mesh else comm.count
        self._replica, self._at = divmod(comm.index, self._places)
        self.whole = self._places == 1
        self.shard = Shard(self._replica, comm.count // self._places)
        if self._numerics.compile and self._places > 1:
            raise ConfigError(
                "compile: true does not go with strategy 'pipeline': what is compiled is the whole "
                "model, which no member has",
                ("compile",),
            )
        super().setup(task if self.whole else as_factory(task), comm)

    def _place(self) -> None:
        self._world = self._comm.collective()
        self._all_names, self._parameters = trainable(self.model)
        self._own_optimizer = super()._optimizer()  # before anything is on the meta device
        self._group_names = _names_of_groups(self.model, self._own_optimizer)
        stages = [(0, self.model)] if self._places == 1 else self._cut()
        holders = find_holders(self.model, stages)
        elsewhere = {t for t, places in holders.items() if self._at not in places}
        # Drop every reference to tensors of other members, so that their memory is freed.
        self._holders = {t: places for t, places in holders.items() if t not in elsewhere}
        _forget(self._own_optimizer, elsewhere)
        make_meta(self.model, elsewhere)

    def _cut(self) -> list[tuple[int, nn.Module]]:
        """Decide on the stages and build this member's; return (place, layer) pairs of all."""
        _check_state(self.model)
        section, device = self._parallel.pipeline, self._numerics.device
        cut = decide(
            self.model,
            self._task,
            section,
            self._places,
            self._world,
            self._autocast,
            self._usual_samples(),
        )
        layers = [[self.model.get_submodule(n) for n in names] for names in cut.stages]
        axes = {"data": self.shard.count, "pipeline": self._places}
        self._line = Line(self._comm.mesh(axes).get_group("pipeline"))
        self._draws = Draws(device)
        self._runner = Runner(
            [
                Stage(at, start, own, self._autocast, self._draws.begin)
                for at, (start, own) in enumerate(zip(cut.starts, layers, strict=True))
                if at % self._places == self._at
            ],
            [names[-1] for names in cut.stages],
            self._places,
            self._line,
            device,
        )
        self._stage_count = len(layers)
        return [(at % self._places, layer) for at, own in enumerate(layers) for layer in own]

    def _usual_samples(self) -> int:
        known = self._numerics
        wanted = self._parallel.pipeline.micro
        return usual(known.batch, self.shard.count, known.micro, self._places, wanted)

    def _optimizer(self) -> Optimizer:
        return self._own_optimizer

    def _join(self) -> None:
        pairs = zip(self._names, self._parameters, strict=True)
        here = [(name, p) for name, p in pairs if not p.is_meta]
        self._names, self._parameters = [n for n, _ in here], [p for _, p in here]
        self._replicas = self._among((self._at,))
        tied = [p for p in set(self._holders.values()) if self._at in p and len(p) > 1]
        shared = {(self._at,): self._replicas} | {p: self._among(p) for p in sorted(tied)}
        named = dict(chain(self.model.named_parameters(), self.model.named_buffers()))
        make_alike(named, shared, self._holders, self._parallel.sync.skip_init)
        self._shared = [
            SharedGradients(alike, collective)
            for places, collective in shared.items()
            if collective.count > 1
            for alike in by_dtype(p for p in self._parameters if self._holders[p] == places)
        ]
        together = self._parallel.sync.batch_norm == "synchronised" and self._replicas.count > 1
        self._lockstep = together and synchronise(self.model, self._replicas)

    def _among(self, places: Places) -> Collective:
        """Return the group of the members at these places of every replica."""
        replicas = range(self.shard.count)
        members = [replica * self._places + place for replica in replicas for place in places]
        return self._comm.collective(members, device=self._numerics.device)

    def _weights(self) -> dict[str, Tensor]:
        whole = self.model.state_dict()
        here = {name: {"": t} for name, t in whole.items() if not t.is_meta}
        found = self._gathered(here)
        return {name: found[name][""] for name in whole if name in found}

    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"for .*: copying from a non-meta parameter")
            super()._load_weights(weights)

    def _optimizer_state(self) -> dict[str, Any]:
        mine = super()._optimizer_state()
        state = self._gathered(mine["state"])
        pairs = zip(mine["groups"], self._group_names, strict=True)
        return {"state": state, "groups": [group | {"names": names} for group, names in pairs]}

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        super()._load_optimizer_state(
            without_elsewhere(state, set(self._names), set(self._all_names))
        )
        pairs = zip(self._own_optimizer.param_groups, self._group_names, strict=True)
        for group, names in pairs:
            if not group["params"]:
                group.update(options_of(state, names))

    def _gathered(self, part: Part) -> Part:
        if self._places == 1 or self._replica:
            return part
        return gather(self._line, self._at, self._places, part)

    def let_go(self) -> None:
        unsynchronise(self.model)
        super().let_go()


def _check_state(model: nn.Module) -> None:
    for name, held in model.state_dict().items():
        if not isinstance(held, Tensor):
            raise TaskError(
                f"the model keeps {name!r}, which is no tensor: strategy 'pipeline' cannot tell "
                f"whose it is"
            )


def _names_of_groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]


def _forget(optimizer: Optimizer, elsewhere: set[Tensor]) -> None:
    """Remove parameters of other members; empty groups stay, so that all have the same groups."""
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in elsewhere]
    for parameter in elsewhere & set(optimizer.state):
        del optimizer.state[parameter]


class Pipeline(Staged):
    """A pipeline of members along the `pipeline` axis, replicated along the `data` axis."""

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

    def _cut_up(self, micro: Sequence[Batch], learning: bool) -> list[list[Batch]]:
        """Cut each batch into micro-batches."""
        if learning and self._lockstep:
            return self._cut_alike(micro)
        sizes = [size(batch) for batch in micro]
        pairs = zip(micro, sizes, strict=True)
        return [pieces(batch, self._how_many(samples)) for batch, samples in pairs]

    def _cut_alike(self, micro: Sequence[Batch]) -> list[list[Batch]]:
        """Cut each batch into the same number of pieces in every replica, if need be empty ones,
        because synchronized batch norm sums over all replicas in every pass."""
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

    def _look(self, micro: Sequence[Batch], end: End) -> None:
        steps = forward_plan(self._places, self._stage_count, len(micro))[self._at]
        self._runner.run(steps, micro, self._enter, end, learning=False)

    def total(self, stats: Stats) -> Stats:
        return total(self._world, stats, list(self._metrics))

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
        """Return the parameters that this member counts: each is counted once, though several
        members may hold it."""
        pairs = [] if self._replica else zip(self._names, self._parameters, strict=True)
        return {name: p for name, p in pairs if self._holders[p][0] == self._at}

    def _inspect(self, inspector: Inspector) -> None:
        """Inspect the layers of all members, by their norms. Member 0 reports them."""
        weights, grads = all_norms(self._world, self._all_names, self._firsts())
        inspector.inspect(self.version + 1, weights, grads)

    def _applied(self) -> None:
        factor = self._schedule.factor(self.version)
        for group in self._own_optimizer.param_groups:
            if not group["params"]:  # the stepper only sets the rate of groups with parameters
                group["lr"] = group["initial_lr"] * factor
        if self._buffers and self._replicas.count > 1:
            self._replicas.broadcast_([held[name] for held, name in self._buffer_homes])

    def _explain(self) -> str:
        """Return the explanation of the stage nearest to the cause.

        Every replica investigates alone, so batch norm must not wait for the others.
        """
        unsynchronise(self.model)
        words = explain_stage(self._world, self.model, self._again, self._micro, self._met_loss)
        if self._lockstep:
            synchronise(self.model, self._replicas)
        return f"step {self.version + 1}: {words}"

    def _again(self, model: nn.Module, batch: Batch) -> Any:
        if self._places == 1:
            return self._forward(model, batch)
        return self._look(pieces(batch, self._how_many(size(batch))), lambda output, _: output)


class Seen:
    """The sums of an evaluation: loss, weight and metrics; all zero without the last stage."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self.loss_sum = torch.zeros((), dtype=torch.float64)
        self.weight = 0.0
        self.totals: dict[str, Tensor] = {}

    def add(self, loss_sum: Tensor, weight: float, output: Any, batch: Batch) -> None:
        self.loss_sum += loss_sum.to("cpu", torch.float64).view(())
        self.weight += weight
        for name, metric in self._metrics.items():
            part = metric.measure(output, batch)
            self.totals[name] = self.totals[name] + part if name in self.totals else part
