"""What a member of a pipeline holds: its stages, and the part of the optimizer that goes with them.

Every member builds the whole model, so that all know its names and shapes, and lets go of what
others hold. Checkpoints are whole: put together on the way out, taken apart on the way in.
"""

from __future__ import annotations

import warnings
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.comm.interface import Collective
from echelon.core.errors import ConfigError, TaskError
from echelon.core.interfaces import Comm, Task
from echelon.core.types import Shard
from echelon.strategy.batch_norm import synchronise, unsynchronise
from echelon.strategy.pipeline.decide import decide
from echelon.strategy.pipeline.draws import Draws
from echelon.strategy.pipeline.holders import (
    Places,
    SharedGradients,
    by_dtype,
    find_holders,
    make_alike,
    make_meta,
)
from echelon.strategy.pipeline.line import Line
from echelon.strategy.pipeline.pieces import usual
from echelon.strategy.pipeline.runner import Runner
from echelon.strategy.pipeline.stage import Stage
from echelon.strategy.pipeline.whole import Part, gather, options_of, without_elsewhere
from echelon.strategy.ready import as_factory
from echelon.strategy.replica import trainable
from echelon.strategy.synchronous import Synchronous


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
