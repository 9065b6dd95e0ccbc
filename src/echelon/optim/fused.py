"""torch's fused optimizer kernels, called over lists that are gathered once.

`torch.optim` gathers parameters and state, groups them by device and passes several layers of
Python at every step: 30 to 70 µs, however small the model. A lane keeps those lists and calls the
same kernel, with the same arguments, at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from echelon.optim.build import is_penalised

Group = dict[str, Any]
State = dict[str, Any]


class Update(Protocol):
    """One kernel call: takes the gradients in the order of the lane's parameters, and a factor.

    Multiplying by the factor costs no pass of its own, but may leave the gradients changed.
    """

    def __call__(self, grads: list[Tensor], scale: float = 1.0) -> None: ...


@dataclass(frozen=True, slots=True)
class Lane:
    """Parameters of one group, on one device and of one dtype: one kernel call."""

    group: Group
    params: list[Tensor]
    update: Update
    penalised: bool


def lanes_of(optimizer: Optimizer) -> list[Lane] | None:
    """Return the lanes of one step, or None if `optimizer.step()` itself is needed."""
    kernel = _KERNELS.get(type(optimizer))
    if kernel is None or not all(_is_plain(group) for group in optimizer.param_groups):
        return None
    lanes: list[Lane] = []
    for group in optimizer.param_groups:
        for params in _alike(group["params"]):
            states = [optimizer.state.get(p, {}) for p in params]
            if not all(_keys(optimizer, group) <= state.keys() for state in states):
                return None
            lanes.append(Lane(group, params, kernel(group, params, states), is_penalised(group)))
    return lanes


def _is_plain(group: Group) -> bool:
    special = group.get("capturable") or group.get("differentiable")
    return bool(group["fused"]) and not special and not isinstance(group["lr"], Tensor)


def _alike(params: list[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for p in params:
        kinds[p.device, p.dtype].append(p)
    return list(kinds.values())


def has_kernel(optimizer: Optimizer) -> bool:
    """Return whether one of torch's fused kernels steps every group."""
    kernel = type(optimizer) in _KERNELS
    return kernel and all(group["fused"] for group in optimizer.param_groups)


def state_keys(optimizer: Optimizer, group: Group) -> set[str] | None:
    """Return what an optimizer of torch keeps for each parameter; None for an unknown optimizer."""
    kind = type(optimizer)
    if kind in _KERNELS:
        return _keys(optimizer, group)
    if kind is torch.optim.RMSprop:
        options = {"momentum_buffer": group["momentum"] > 0, "grad_avg": group["centered"]}
        return {"step", "square_avg", *(key for key, kept in options.items() if kept)}
    return None


def _keys(optimizer: Optimizer, group: Group) -> set[str]:
    if isinstance(optimizer, SGD):
        return {"momentum_buffer"} if group["momentum"] else set()
    if isinstance(optimizer, Adagrad):
        return {"step", "sum"}
    return {"step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])}


# The kernels


def _sgd(group: Group, params: list[Tensor], states: list[State]) -> Update:
    buffers = _column(states, "momentum_buffer") if group["momentum"] else []
    divisor = _Divisor(params)

    def update(grads: list[Tensor], scale: float = 1.0) -> None:
        momentum, decay, lr = group["momentum"], group["weight_decay"], group["lr"]
        dampening, scaled = group["dampening"], None
        assert bool(momentum) == bool(buffers), "momentum was switched on or off in mid-run"
        if scale != 1.0 and group["nesterov"]:
            scaled = divisor.of(grads, scale)
        elif scale != 1.0:  # the numbers that gradients are multiplied with anyway
            decay /= scale
            if momentum:
                dampening = 1 - (1 - dampening) * scale
            else:
                lr *= scale
        torch._fused_sgd_(
            params,
            grads,
            buffers,
            weight_decay=decay,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=scaled,
        )

    return update


def _adam(group: Group, params: list[Tensor], states: list[State]) -> Update:
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    counts, steps = _shared_steps(states)
    one = torch.ones_like(counts)  # a Python 1 would be wrapped into a tensor at every step
    means, squares = _column(states, "exp_avg"), _column(states, "exp_avg_sq")
    largest = _column(states, "max_exp_avg_sq") if group["amsgrad"] else []
    divisor = _Divisor(params)

    def update(grads: list[Tensor], scale: float = 1.0) -> None:
        counts.add_(one)
        beta1, beta2 = group["betas"]
        kernel(
            params,
            grads,
            means,
            squares,
            largest,
            steps,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=bool(largest),
            maximize=group["maximize"],
            grad_scale=None if scale == 1.0 else divisor.of(grads, scale),
        )

    return update


def _adagrad(group: Group, params: list[Tensor], states: list[State]) -> Update:
    counts, steps = _shared_steps(states)
    one = torch.ones_like(counts)
    sums = _column(states, "sum")
    divisor = _Divisor(params)

    def update(grads: list[Tensor], scale: float = 1.0) -> None:
        counts.add_(one)
        torch._fused_adagrad_(
            params,
            grads,
            sums,
            steps,
            lr=group["lr"],
            lr_decay=group["lr_decay"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None if scale == 1.0 else divisor.of(grads, scale),
        )

    return update


class _Divisor:
    """The tensor by which a kernel divides gradients.

    Kernels take it in single precision. Gradients of other types are multiplied beforehand.
    """

    def __init__(self, params: list[Tensor]) -> None:
        first = params[0]
        self._tensor = torch.ones((), device=first.device) if _is_single(first) else None
        self._value = 1.0

    def of(self, grads: list[Tensor], scale: float) -> Tensor | None:
        if self._tensor is None:
            torch._foreach_mul_(grads, scale)
        elif scale != self._value:  # updates of equal weight follow each other
            self._tensor.fill_(1 / scale)
            self._value = scale
        return self._tensor


def _is_single(parameter: Tensor) -> bool:
    return parameter.dtype == torch.float32


def _shared_steps(states: list[State]) -> tuple[Tensor, list[Tensor]]:
    """Make the step counts views of one tensor, so that one addition advances them all."""
    counts = torch.stack(_column(states, "step"))
    for state, count in zip(states, counts.unbind(), strict=True):
        state["step"] = count
    return counts, _column(states, "step")


def _column(states: list[State], key: str) -> list[Tensor]:
    return [state[key] for state in states if key in state]


# Exact types: a subclass may do anything in its step.
_KERNELS: dict[type[Optimizer], Callable[[Group, list[Tensor], list[State]], Update]] = {
    SGD: _sgd,
    Adam: _adam,
    AdamW: _adam,
    Adagrad: _adagrad,
}
