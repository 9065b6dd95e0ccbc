"""One update of the parameters by any torch optimizer, and loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from echelon.core.errors import CheckpointError, TaskError
from echelon.optim.build import penalise_, plain_step
from echelon.optim.fused import Lane, has_kernel, lanes_of
from echelon.optim.state import named_state, restore_named_state


class Stepper:
    """Steps an optimizer, scales its learning rates and saves its state by parameter name.

    The stepper owns the learning rate: a group's `lr` is its `initial_lr` times the last factor.
    torch's built-in optimizers with fused kernels are stepped without torch's Python around them,
    whenever that is the same; everything else goes through `optimizer.step()`.
    """

    def __init__(
        self, optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
    ) -> None:
        if isinstance(optimizer, LBFGS):
            raise TaskError("optimizer LBFGS computes the loss several times a step: take another")
        self.optimizer = optimizer
        self._names = {parameter: name for name, parameter in named_parameters}
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
            for parameter in group["params"]:
                if parameter not in self._names:
                    shape = tuple(parameter.shape)
                    raise TaskError(f"the optimizer holds a parameter {shape} that has no name")
        self._plan()

    def step(self, factor: float, scale: float = 1.0) -> None:
        """Make one update at `factor` times each group's own learning rate.

        Gradients count `scale` times. Unless `scale` is 1 they may be changed.
        """
        enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # a tenth of the cost of torch.no_grad()
        try:
            if not self._step_lanes(factor, scale):
                self._step_whole(factor, scale)
        finally:
            torch._C._set_grad_enabled(enabled)

    def state_dict(self) -> dict[str, Any]:
        """Return state and group options by parameter name. Large tensors are not copied."""
        return named_state(self.optimizer, self._names)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load state and options (learning rates too), or raise CheckpointError and change
        nothing."""
        restore_named_state(self.optimizer, self._names, state)
        self._plan()

    def _plan(self) -> None:
        """Gather the lanes once, and keep what they were gathered from, to see when it changes."""
        self.lanes: list[Lane] | None = lanes_of(self.optimizer)
        self._groups = self.optimizer.param_groups
        self._state = self.optimizer.state
        self._params = [list(group["params"]) for group in self._groups]

    def _step_lanes(self, factor: float, scale: float) -> bool:
        """Make the step by fused kernels. Returns False, with nothing done, if the result could
        differ from that of `optimizer.step()`."""
        lanes = self.lanes
        if lanes is None or self._is_hooked() or not self._is_as_planned():
            return False
        all_grads: list[list[Tensor]] = []
        for lane in lanes:
            grads = [grad for p in lane.params if (grad := p.grad) is not None]
            if len(grads) < len(lane.params):
                return False
            all_grads.append(grads)
        for lane, grads in zip(lanes, all_grads, strict=True):
            group = lane.group
            group["lr"] = group["initial_lr"] * factor
            if lane.penalised:
                if scale != 1.0:
                    torch._foreach_mul_(grads, scale)
                penalise_(lane.params, grads, group)
                lane.update(grads)
            else:
                lane.update(grads, scale)
        return True

    def _is_hooked(self) -> bool:
        """Return whether hooks or a wrapper have to run in `optimizer.step()`."""
        optimizer = self.optimizer
        return bool(
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or "step" in vars(optimizer)  # torch's schedulers wrap it so
        )

    def _is_as_planned(self) -> bool:
        optimizer = self.optimizer
        groups = optimizer.param_groups
        if groups is not self._groups or optimizer.state is not self._state:
            return False  # torch's own load_state_dict replaces both
        if len(groups) != len(self._params):
            return False
        for group, params in zip(groups, self._params, strict=True):
            now = group["params"]
            if len(now) != len(params) or not all(map(is_, now, params)):
                return False
        return True

    def _step_whole(self, factor: float, scale: float) -> None:
        """Make the step through torch. The first one creates the state that lanes need."""
        for group in self.optimizer.param_groups:
            _set_lr(group, factor)
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            if params and scale != 1.0:
                torch._foreach_mul_(grads, scale)
            if params:
                penalise_(params, grads, group)
        if isinstance(self.optimizer, SGD):
            _complete_momentum(self.optimizer)
        if self._is_hooked():
            self.optimizer.step()
        else:
            plain_step(self.optimizer)
        if self.lanes is None or not self._is_as_planned():
            self._plan()


def _set_lr(group: dict[str, Any], factor: float) -> None:
    rate = group.setdefault("initial_lr", float(group["lr"])) * factor
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _complete_momentum(optimizer: SGD) -> None:
    """Give every parameter a buffer once any has one.

    torch's fused sgd fails when a parameter gets its first gradient later than the others. From
    an empty buffer its first step is the same as without one, unless the gradient is dampened.
    """
    for group in optimizer.param_groups:
        if not (group["fused"] and group["momentum"] and not group["dampening"]):
            continue
        params = [p for p in group["params"] if p.grad is not None]
        bare = [p for p in params if "momentum_buffer" not in optimizer.state[p]]
        if len(bare) < len(params):
            for p in bare:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def reads_gradients_only(optimizer: Optimizer) -> bool:
    """Return whether a step leaves the gradients unchanged, so that others may be reading them."""
    changed = ("l1", "l2")
    plain = not any(group.get(name) for group in optimizer.param_groups for name in changed)
    return plain and has_kernel(optimizer)


# Loss scaling for fp16, whose smallest gradients would otherwise round to nothing

START = 2.0**16
LARGEST = 2.0**24
SMALLEST = 1.0
GROWTH_EVERY = 2000


class LossScaler:
    """The factor a loss is multiplied by before backward, and its gradients divided by after.

    It doubles after 2000 good steps in a row and halves on an overflow. Only fp16 needs it: for
    every other precision the scale is 1 for good.
    """

    def __init__(self, precision: str) -> None:
        self.enabled = precision == "fp16"
        self.scale = START if self.enabled else 1.0
        self.exhausted = False
        """Whether gradients overflow even unscaled: the scale is not the cause."""
        self._good = 0

    def update(self, finite: bool) -> None:
        """Adapt the scale to whether the step's gradients were finite."""
        if not self.enabled:
            return
        if not finite:
            self.exhausted = self.scale <= SMALLEST
            self.scale = max(SMALLEST, self.scale / 2)
            self._good = 0
            return
        self.exhausted = False
        self._good += 1
        if self._good == GROWTH_EVERY:
            self.scale = min(LARGEST, self.scale * 2)
            self._good = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self._good} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != self.state_dict().keys():
            raise CheckpointError(
                "the saved loss scale does not fit: only runs in fp16 have one, and all of them"
            )
        if self.enabled:
            self.scale, self._good = float(state["scale"]), int(state["good"])
            self.exhausted = False
