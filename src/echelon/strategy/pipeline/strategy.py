"""Pipeline strategy and its state.

Every member has a stage, a few consecutive layers, and the batch goes through in pieces.

    replica 0   member 0: stage 0 ─▶ member 1: stage 1 ─▶ …       along the pipeline axis
    replica 1   member P: stage 0 ─▶ member P+1: stage 1 ─▶ …     other samples: the data axis

All members of a replica are given the same batch; the first stage reads its input, the last one
computes loss and metrics. Gradients are Σ grad / Σ weight over all micro-batches and replicas.

Batch norm sees one micro-batch at a time, as in one process that accumulates as many. Replicas take
theirs together, unless `sync.batch_norm` is local; the running figures are then those of replica 0.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.comm.interface import Collective
from echelon.core.errors import ConfigError, TaskError, unknown
from echelon.core.interfaces import Comm, Inspector, Task
from echelon.core.types import Batch, Shard, Stats
from echelon.data.batch import emptied, size
from echelon.optim import gradients
from echelon.strategy.all_reduce import total
from echelon.strategy.base import NO_GRADIENT, Met, Synchronous, as_factory, as_pair
from echelon.strategy.batch_norm import synchronise, unsynchronise
from echelon.strategy.diagnose import explain_stage
from echelon.strategy.model import trainable
from echelon.strategy.pipeline.partition import decide, entrance, first_samples
from echelon.strategy.pipeline.runner import End, Runner, Seen
from echelon.strategy.pipeline.schedule import forward_plan, how_many, pieces, plan, usual
from echelon.strategy.pipeline.stage import Draws, Line, Stage

# --- staged ---
# What a member of a pipeline holds: its stages, and the part of the optimizer that goes with them.
#
# Every member builds the whole model, so that all know its names and shapes, and lets go of what
# others hold. Checkpoints are whole: put together on the way out, taken apart on the way in.


class Staged(Synchronous):
    """Member `replica · places + place` of a mesh with the axes `data` and `pipeline`.

    `model` is whole in its names and shapes; what other members hold is on the meta device.
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
        # Nothing may refer to what is elsewhere any more: that is what frees its memory.
        self._holders = {t: places for t, places in holders.items() if t not in elsewhere}
        _forget(self._own_optimizer, elsewhere)
        make_meta(self.model, elsewhere)

    def _cut(self) -> list[tuple[int, nn.Module]]:
        """Decide on the stages, and build this member's; returns (place, layer) pairs."""
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
        """The members at these places of every replica."""
        replicas = range(self.shard.count)
        members = [replica * self._places + place for replica in replicas for place in places]
        return self._comm.collective(members, device=self._numerics.device)

    def let_go(self) -> None:
        unsynchronise(self.model)
        super().let_go()

    def _weights(self) -> dict[str, Tensor]:
        whole = self.model.state_dict()
        here = {name: {"": t} for name, t in whole.items() if not t.is_meta}
        found = self._gathered(here)
        return {name: found[name][""] for name in whole if name in found}

    def _optimizer_state(self) -> dict[str, Any]:
        mine = super()._optimizer_state()
        state = self._gathered(mine["state"])
        pairs = zip(mine["groups"], self._group_names, strict=True)
        return {"state": state, "groups": [group | {"names": names} for group, names in pairs]}

    def _gathered(self, part: Part) -> Part:
        if self._places == 1 or self._replica:
            return part
        return gather(self._line, self._at, self._places, part)

    def _load_weights(self, weights: dict[str, Tensor]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"for .*: copying from a non-meta parameter")
            super()._load_weights(weights)

    def _load_optimizer_state(self, state: dict[str, Any]) -> None:
        super()._load_optimizer_state(
            without_elsewhere(state, set(self._names), set(self._all_names))
        )
        pairs = zip(self._own_optimizer.param_groups, self._group_names, strict=True)
        for group, names in pairs:
            if not group["params"]:
                group.update(options_of(state, names))


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
    """Leave to others what they hold; groups stay, so that all members have the same."""
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in elsewhere]
    for parameter in elsewhere & set(optimizer.state):
        del optimizer.state[parameter]


# --- strategy ---


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
        words = explain_stage(self._world, self.model, self._again, self._micro, self._met_loss)
        if self._lockstep:
            synchronise(self.model, self._replicas)
        return f"step {self.version + 1}: {words}"

    def _again(self, model: nn.Module, batch: Batch) -> Any:
        if self._places == 1:
            return self._forward(model, batch)
        return self._look(pieces(batch, self._how_many(size(batch))), lambda output, _: output)


# --- holders ---
# Who holds which parameter, and how those who hold the same one stay alike.
#
# A parameter lives where its stage is: at one place of the pipeline, in every replica along the
# data axis. A tied one (a table that both the first and the last stage use) lives at several
# places. Its gradient is the sum over all of them, and each makes the same step.

Places = tuple[int, ...]


def find_holders(model: nn.Module, stages: Iterable[tuple[int, nn.Module]]) -> dict[Tensor, Places]:
    """The places of every parameter and buffer; `stages` gives (place, layer) pairs."""
    found: dict[Tensor, set[int]] = {}
    for place, layer in stages:
        for tensor in chain(layer.parameters(), layer.buffers()):
            found.setdefault(tensor, set()).add(place)
    assert set(found) == set(chain(model.parameters(), model.buffers())), "a layer is in no stage"
    return {tensor: tuple(sorted(places)) for tensor, places in found.items()}


@torch.no_grad()
def make_meta(model: nn.Module, elsewhere: Iterable[Tensor]) -> None:
    """Let go of what others hold: shape and dtype stay, memory goes."""
    empty = {tensor: tensor.to("meta") for tensor in elsewhere}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in empty:
                frozen = not parameter.requires_grad
                held = empty[parameter]
                if not isinstance(held, nn.Parameter):
                    held = empty[parameter] = nn.Parameter(held, requires_grad=not frozen)
                module._parameters[name] = held
        for name, buffer in module._buffers.items():
            if buffer in empty:
                module._buffers[name] = empty[buffer]


def make_alike(
    named: Mapping[str, Tensor],
    shared: Mapping[Places, Collective],
    holders: Mapping[Tensor, Places],
    skip: Sequence[str],
) -> None:
    """Copy what several members hold from the first of them, but for what `skip` names."""
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise ConfigError(
                unknown("sync.skip_init: parameter", pattern, named), ("sync", "skip_init")
            )
    for places, collective in shared.items():
        chosen = [
            tensor.detach()
            for name, tensor in named.items()
            if holders.get(tensor) == places
            and tensor.numel()
            and not any(fnmatchcase(name, pattern) for pattern in skip)
        ]
        collective.broadcast_(chosen)


class SharedGradients:
    """Gradients that several members have, summed in one row of memory.

    Behind them, in the same row, each member says which ones it has at all.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], collective: Collective) -> None:
        self._parameters, self._collective = parameters, collective
        size = sum(p.numel() for p in parameters)
        first = parameters[0]
        self._row = torch.zeros(size + len(parameters), dtype=first.dtype, device=first.device)
        self._present = self._row[size:]
        self._views: list[Tensor] = []
        start = 0
        for p in parameters:
            self._views.append(self._row.as_strided(p.shape, p.stride(), start))
            start += p.numel()

    def sum(self) -> None:
        """Leave the sum in every parameter's `grad`."""
        grads = [p.grad for p in self._parameters]
        self._row.zero_()
        pairs = [(v, g) for v, g in zip(self._views, grads, strict=True) if g is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        self._present.copy_(torch.tensor([float(grad is not None) for grad in grads]))
        self._collective.sum_(self._row)
        for p, view, count in zip(
            self._parameters, self._views, self._present.tolist(), strict=True
        ):
            p.grad = view if count else None


def by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.dtype, []).append(parameter)
    return list(found.values())


# --- whole ---
# The whole model's state, put together at the first place of a pipeline.
#
# Messages are plain: first how many bytes follow, then JSON that says which tensors come, then
# those.

Part = dict[str, dict[str, Any]]
"""Name → what belongs to it: tensors and plain values."""
_TENSOR = "tensor"


def gather(line: Line, place: int, places: int, part: Part) -> Part:
    """All parts in one at place 0; the others get their own back."""
    if place > 0:
        _send(line, part)
        return part
    whole: Part = {}
    for other in range(places - 1, 0, -1):
        whole.update(_receive(line, other))
    return whole | part


def without_elsewhere(
    saved: Mapping[str, Any], mine: set[str], everywhere: set[str]
) -> dict[str, Any]:
    """An optimizer's saved state, less what other members keep. What nobody knows stays in."""
    if not _is_whole(saved):
        return dict(saved)  # refused by who reads it
    elsewhere = everywhere - mine
    groups = [
        {**group, "names": [name for name in group["names"] if name not in elsewhere]}
        for group in saved["groups"]
    ]
    state = {name: held for name, held in saved["state"].items() if name not in elsewhere}
    return {"state": state, "groups": groups}


def _is_whole(saved: Mapping[str, Any]) -> bool:
    return "state" in saved and all("names" in group for group in saved.get("groups", ()))


def options_of(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The options that these parameters were saved with."""
    for group in saved["groups"]:
        if not set(names).isdisjoint(group["names"]):
            return {key: value for key, value in group.items() if key != "names"}
    return {}


def _send(line: Line, part: Part) -> None:
    tensors: list[Tensor] = []
    said = {
        name: {key: _described(value, tensors) for key, value in held.items()}
        for name, held in part.items()
    }
    text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    line.send(torch.tensor([len(text)]), 0, 0)
    line.send(text, 0, 0)
    for tensor in tensors:
        line.send(tensor.detach().cpu().contiguous(), 0, 0)
    line.settle()


def _described(value: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    tensors.append(value)
    return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}


def _receive(line: Line, place: int) -> Part:
    size = line.receive(torch.zeros(1, dtype=torch.int64), place, 0)
    text = line.receive(torch.empty(int(size), dtype=torch.uint8), place, 0)
    said = json.loads(bytes(text.numpy()))
    return {
        name: {key: _understood(line, place, value) for key, value in held.items()}
        for name, held in said.items()
    }


def _understood(line: Line, place: int, value: Any) -> Any:
    if not isinstance(value, dict) or value.keys() != {_TENSOR}:
        return value
    dtype, shape = value[_TENSOR]
    room = torch.empty(shape, dtype=getattr(torch, dtype))
    return line.receive(room, place, 0)


# --- norms ---
# How large everybody's weights and gradients are.


def all_norms(
    world: Collective, names: Sequence[str], mine: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and gradients of all members, each as one number: it has the norm of the whole.

    `mine` are the parameters that are this member's to tell of; one without gradient is left out.
    """
    held = [(name, p.detach(), p.grad) for name, p in mine.items() if p.grad is not None]
    sizes = gradients.layer_norms((name, weight) for name, weight, _ in held)
    slopes = gradients.layer_norms((name, grad) for name, _, grad in held)
    norms = torch.zeros(len(names), 3, dtype=torch.float64)
    for at, name in enumerate(names):
        if name in sizes:
            norms[at] = torch.tensor([1.0, sizes[name], slopes[name]])
    world.sum_(norms)
    found = [(name, row) for name, row in zip(names, norms, strict=True) if row[0]]
    return {name: row[1] for name, row in found}, {name: row[2] for name, row in found}
