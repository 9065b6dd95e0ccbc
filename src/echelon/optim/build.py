"""Build the torch optimizer that a job asks for, with torch's fused kernels.

torch knows one penalty (`weight_decay`). The other penalties are options of a parameter group that
`penalise_` applies: step such an optimizer with a `Stepper`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from echelon.core.config import OptimizerSection
from echelon.core.errors import TaskError

DEFAULT_MOMENTUM = 0.9
DEFAULT_BETAS = (0.9, 0.999)
DEFAULT_EPS = 1e-8
ADAGRAD_EPS = 1e-10


def build(section: OptimizerSection, model: nn.Module) -> Optimizer:
    """Return the optimizer a job asks for, over all parameters of `model` that are trained.

    Its groups have options that torch does not know (`l1`, `l2`, `decay`); `Stepper` applies them.
    Raises TaskError if nothing is trained, or a layer makes sparse gradients.
    """
    _refuse_sparse(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise TaskError("the model has no parameter to train")
    return _build(section, _groups(section, trained), trained)


def build_for(section: OptimizerSection, trained: list[nn.Parameter], penalised: bool) -> Optimizer:
    """Return an optimizer over parameters that are all penalised, or none of them, regardless of
    their shapes."""
    return _build(section, [_group(section, trained, penalised)], trained)


def _build(
    section: OptimizerSection, groups: list[dict[str, Any]], trained: list[nn.Parameter]
) -> Optimizer:
    fused = _has_fused_kernel(section.name, trained)
    momentum = section.momentum
    eps = section.eps or DEFAULT_EPS
    betas = section.betas or DEFAULT_BETAS
    match section.name:
        case "sgd":
            return SGD(groups, section.lr, fused=fused)
        case "momentum" | "nesterov":
            momentum = DEFAULT_MOMENTUM if momentum is None else momentum
            # torch refuses nesterov without momentum, where both mean plain sgd
            nesterov = section.name == "nesterov" and momentum > 0
            return SGD(groups, section.lr, momentum, nesterov=nesterov, fused=fused)
        case "adagrad":
            return Adagrad(groups, section.lr, eps=section.eps or ADAGRAD_EPS, fused=fused)
        case "rmsprop":
            return RMSprop(groups, section.lr, eps=eps, momentum=momentum or 0.0, foreach=True)
        case "adam":
            return Adam(groups, section.lr, betas, eps, fused=fused)
        case "adamw":
            return AdamW(groups, section.lr, betas, eps, fused=fused)


_WRONG_IN_HALVES = ("sgd", "momentum", "nesterov")
"""torch 2.13's fused kernel on CPU is wrong for these in half precision: after three steps bf16
parameters are 0.2 to 0.5 off, with the plain kernel 0.01."""


def _has_fused_kernel(name: str, parameters: Iterable[nn.Parameter]) -> bool:
    devices = {"cpu"} if name == "adagrad" else {"cpu", "cuda"}
    return all(
        torch.is_floating_point(p)
        and p.device.type in devices
        and not (name in _WRONG_IN_HALVES and p.device.type == "cpu" and p.itemsize < 4)
        for p in parameters
    )


def _groups(section: OptimizerSection, trained: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return one parameter group, or two if only some parameters are penalised."""
    flags = penalised(section, trained)
    groups = [
        _group(section, [p for p, flag in zip(trained, flags, strict=True) if flag is kind], kind)
        for kind in (True, False)
    ]
    return [group for group in groups if group["params"]]


def _group(
    section: OptimizerSection, trained: list[nn.Parameter], penalised: bool
) -> dict[str, Any]:
    penalties = _penalties(section)
    return {"params": trained, **(penalties if penalised else dict.fromkeys(penalties, 0.0))}


def penalised(section: OptimizerSection, parameters: Iterable[Tensor]) -> list[bool]:
    """Return for each parameter whether l1, l2 and weight decay act on it.

    Biases and norms are spared (`decay = "matrices"`). All are True if there are no penalties, so
    that one group is enough.
    """
    every = section.decay == "all" or not any(_penalties(section).values())
    return [every or p.ndim >= 2 for p in parameters]


def _penalties(section: OptimizerSection) -> dict[str, float]:
    """Return which penalties torch applies itself (`weight_decay`), and which are left to us.

    AdamW's own weight decay is decoupled; that of the others adds l2·w to the gradient. It would
    see weights that `decay` has already shrunk, so with both we add l2 ourselves, before.
    """
    l1, l2, decay = section.l1, section.l2, section.weight_decay
    if section.name == "adamw":
        return {"weight_decay": decay, "l1": l1, "l2": l2, "decay": 0.0}
    if decay:
        return {"weight_decay": 0.0, "l1": l1, "l2": l2, "decay": decay}
    return {"weight_decay": l2, "l1": l1, "l2": 0.0, "decay": 0.0}


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TaskError(
                f"layer {name!r} makes sparse gradients, which are not supported: "
                f"build it with sparse=False"
            )


# L1, L2 and weight decay

PENALTIES = ("l1", "l2", "decay")


def is_penalised(group: Mapping[str, Any]) -> bool:
    return any(group.get(name) for name in PENALTIES)


def penalise_(params: list[Tensor], grads: list[Tensor], group: Mapping[str, Any]) -> None:
    """Add l2·w and l1·sign(w) to the gradients, then shrink w by lr·decay·w."""
    if l2 := group.get("l2"):
        torch._foreach_add_(grads, params, alpha=l2)
    if l1 := group.get("l1"):
        torch._foreach_add_(grads, torch._foreach_sign(params), alpha=l1)
    if decay := group.get("decay"):
        torch._foreach_mul_(params, 1 - group["lr"] * decay)


# A start without torch's compiler, which saves two seconds
#
# torch's optimizers import the whole compiler when the first of them is made, only to mark a few
# methods as not to be compiled, and again around every step. Echelon does not compile optimizers.
# So the mark that torch looks for first is left on those methods, and the step inside the wrapper
# is called.

_MARK = "__dynamo_disable"
_METHODS = ("add_param_group", "state_dict", "load_state_dict", "zero_grad")


def spare_compiler() -> None:
    """Have optimizers made without importing torch's compiler. May be called again."""
    for name in _METHODS:
        function = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if function is not None and not hasattr(function, _MARK):
            setattr(function, _MARK, function)


def plain_step(optimizer: Optimizer) -> None:
    """Call `optimizer.step()` without torch's wrapper of hooks, profiling and the compiler.

    The caller has switched gradients off and knows that there are no hooks.
    """
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if type(optimizer).__module__.startswith("torch.optim") and not differentiable:
        inspect.unwrap(type(optimizer).step)(optimizer)
    else:
        optimizer.step()
