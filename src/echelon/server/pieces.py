"""A stretch of a shard's weights that is updated by one kernel call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.servers.part import Run
from echelon.core.config import OptimizerSection
from echelon.optim.build import build_for
from echelon.optim.fused import state_keys
from echelon.optim.state import options_of, same_options, set_options
from echelon.optim.step import Stepper


class Rule:
    """How weights of one kind, penalised or not, are updated."""

    def __init__(self, section: OptimizerSection, penalised: bool) -> None:
        self._section = section
        self._penalised = penalised
        self._sample = build_for(section, [nn.Parameter(torch.zeros(1))], penalised)
        group = self._sample.param_groups[0]
        self.options = options_of(group) | {"initial_lr": float(group["lr"])}

    @property
    def keys(self) -> set[str]:
        """What is kept for each weight, `step` among it where updates are counted."""
        found = state_keys(self._sample, self._sample.param_groups[0] | self.options)
        assert found is not None, f"{self._section.name} keeps what nobody knows"
        return found

    def checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Saved options, if they are of the same optimizer."""
        return same_options(self.options, dict(options))

    def stepper(self, weights: Tensor, state: Mapping[str, Tensor]) -> Stepper:
        """Steps `weights` in place, and `state` with them."""
        parameter = nn.Parameter(weights, requires_grad=False)
        optimizer = build_for(self._section, [parameter], self._penalised)
        group = optimizer.param_groups[0]
        group["initial_lr"] = group["lr"]
        set_options(group, self.options)
        if state:
            optimizer.state[parameter] = dict(state)
        return Stepper(optimizer, [("", parameter)])


class Piece:
    """Weights [start, stop) of a range."""

    __slots__ = ("_group", "_lane", "_stepper", "start", "stop", "weights")

    def __init__(self, rule: Rule, run: Run, weights: Tensor, state: Mapping[str, Tensor]) -> None:
        self.start, self.stop, count = run
        mine = {key: values[self.start : self.stop] for key, values in state.items()}
        if "step" in rule.keys:
            mine["step"] = torch.tensor(count, dtype=torch.float32)
        self._stepper = rule.stepper(weights[self.start : self.stop], mine)
        self._group = self._stepper.optimizer.param_groups[0]
        self.weights: Tensor = self._group["params"][0]
        lanes = self._stepper.lanes
        self._lane = lanes[0] if lanes and not lanes[0].penalised else None

    @property
    def run(self) -> Run:
        """Where it lies, and its updates so far; 0 where the optimizer does not count them."""
        held = self._stepper.optimizer.state.get(self.weights, {})
        return self.start, self.stop, float(held.get("step", 0.0))

    @property
    def options(self) -> dict[str, Any]:
        return options_of(self._group)

    def step(self, grad: Tensor, factor: float, scale: float, clip: float = 1.0) -> None:
        """One update; `grad` counts `scale` · `clip` times what it is, and may be changed."""
        if self._lane is not None:  # nobody else gets at this optimizer: nothing to look out for
            self._group["lr"] = self._group["initial_lr"] * factor
            self._lane.update([grad], scale * clip)
            return
        if clip != 1.0:  # rounded as a single process does it, before penalties are added
            grad.mul_(scale)
            scale = clip
        self.weights.grad = grad
        self._stepper.step(factor, scale)
        self.weights.grad = None
