"""Gradients of large linear layers are born where the servers read them, and need no copy.

    autograd:   backward ─▶ a new tensor ─▶ grad ─▶ copied to its slot
    straight:   backward ─▶ its slot

A weight that is used elsewhere, too, gets the rest of its gradient the usual way, and later:
autograd hands over a parameter's gradient only when all its uses are done with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd import forward_ad

from echelon.strategy.replica import give_back

LEAST = 1 << 20
"""Values of a weight: below, calling Python in backward takes longer than the copy."""

Slot = Callable[[], Tensor | None]
"""Where a gradient belongs, if it may be written there now."""


@dataclass(slots=True)
class _Patched:
    """Stands in for a layer's forward, and knows what is done with its weight's gradient."""

    layer: nn.Linear
    weight: Tensor
    plain: Callable[[Tensor], Tensor]
    slot: Slot
    written: Callable[[], None]

    def __call__(self, input: Tensor) -> Tensor:
        if not self._is_ordinary(input):
            return self.plain(input)
        # Flat, for what a function of our own returns as a view may not be changed in place.
        flat = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        found: Tensor = _Straight.apply(flat, self.weight, self.layer.bias, self)  # type: ignore[no-untyped-call]
        return found if flat is input else found.view(*input.shape[:-1], found.shape[-1])

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Linear, str]]:
        """A copy of the layer has the forward of its class: the servers are not copied."""
        return getattr, (self.layer, "forward")

    def _is_ordinary(self, x: Tensor) -> bool:
        """Whether nobody but autograd looks at what happens here."""
        weight = self.layer.weight
        return (
            weight is self.weight
            and weight.requires_grad
            and torch.is_grad_enabled()
            and type(x) is Tensor
            and (x.dtype, x.layout) == (weight.dtype, torch.strided)
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and forward_ad._current_level < 0
            and _functorch.peek_interpreter_stack() is None
        )


def straighten(
    model: nn.Module,
    parameters: Sequence[Tensor],
    slot: Callable[[int], Tensor | None],
    written: Callable[[int], None],
) -> None:
    """`slot` and `written` are called in backward, with the place of a weight in `parameters`."""
    numbers = {id(parameter): at for at, parameter in enumerate(parameters)}
    for layer in model.modules():
        if type(layer) is not nn.Linear or layer.weight.numel() < LEAST:
            continue
        weight, at = layer.weight, numbers.get(id(layer.weight))
        if at is not None and weight.is_cpu and "forward" not in vars(layer):
            here, done = functools.partial(slot, at), functools.partial(written, at)
            # Patched rather than replaced: names and the user's own module stay what they are.
            layer.forward = _Patched(layer, weight, layer.forward, here, done)  # type: ignore[method-assign]


def bend_back(model: nn.Module) -> None:
    """Give the layers back as they came."""
    for layer in model.modules():
        found = vars(layer).get("forward")
        if isinstance(found, _Patched):
            give_back(layer, found.plain)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, by: _Patched) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by = by
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            grad @ weight if of_x else None,
            _of_weight(ctx.by, grad.t(), x) if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


def _of_weight(by: _Patched, left: Tensor, right: Tensor) -> Tensor | None:
    """None if it is where it belongs; gradients that are differentiated again never are."""
    slot = None if torch.is_grad_enabled() or _is_awaited(by.weight) else by.slot()
    if slot is None:
        return left @ right
    torch.mm(left, right, out=slot)
    by.written()
    return None


def _is_awaited(weight: Tensor) -> bool:
    """Whether a hook of the user's wants to see the gradient; one of the others is ours."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks or ()) > 1
