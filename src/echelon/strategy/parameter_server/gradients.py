"""One trainer's gradients on their way to the servers.

Every parameter has a slot that the servers read: shared memory, or memory that is sent from.
`Pushes` fills the slots while backward runs. `straighten` has large linear layers compute their
weights' gradients right into the slots:

usual:      backward ─▶ a new tensor ─▶ grad ─▶ copied to its slot
straight:   backward ─▶ its slot
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd import forward_ad

from echelon.comm.ps.client import Servers
from echelon.optim import gradients
from echelon.strategy.model import give_back

_PIECE = 1 << 18
"""Values copied at a time, so that their norm is taken while they are in the cache."""
_ALL = -1
"""Key of the norm of all gradients together."""


class Pushes:
    """Fills the slots of one update after the other: begin → put … put (or put_all) → filled → end.

    The servers read the slots after a PUSH. A gradient that is computed in place, in the slot that
    `room` returns, is reported by `written` instead of `put`.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._slots = servers.slots
        self._sends = servers.sends
        self.found = list(self._slots)
        """Where the gradients of the present push are: in their slots, or as backward made them if
        they are sent from there."""
        self._pieces = [
            slot.view(-1).split(_PIECE) if slot.is_contiguous() else () for slot in servers.slots
        ]
        self._begun: list[float] = []
        self._norms: dict[int, list[Tensor]] = {}
        """Per parameter, the norms of the pieces of its gradient."""
        self._put: set[int] = set()
        """Parameters whose gradient is there."""

    def begin(self, row: Sequence[float]) -> None:
        """Begin an update with its row (see `server.decisions.Row`), before its last backward."""
        self._begun = list(row)
        self._norms, self._put = {}, set()
        self.end()

    def put(self, at: int, gradient: Tensor) -> None:
        """Take the final gradient of parameter `at`, and its norm while it is in the cache."""
        if self._sends and self._alike(at, gradient):
            self._give(at, gradient.detach())
            self._norms[at] = [gradients.global_norm([gradient])]
        elif self._alike(at, gradient):
            parts = gradient.detach().view(-1).split(_PIECE)
            norms = self._norms[at] = []
            for slot, part in zip(self._pieces[at], parts, strict=True):
                slot.copy_(part)
                norms.append(gradients.global_norm([part]))
        else:
            self._slots[at].copy_(gradient)
            self._norms[at] = [gradients.global_norm([gradient])]
        self._is_put(at)

    def room(self, at: int, dtype: torch.dtype) -> Tensor | None:
        """Return the slot if a gradient of this type can be computed in it, else None.

        The caller calls `written` afterwards.
        """
        slot = self._slots[at]
        return slot if not self._sends and self._pieces[at] and slot.dtype == dtype else None

    def written(self, at: int) -> None:
        """Take a gradient that was computed in its slot."""
        self._norms[at] = [gradients.global_norm([piece]) for piece in self._pieces[at]]
        self._is_put(at)

    def add(self, at: int, gradient: Tensor) -> None:
        """Add the rest of a gradient that was `written`."""
        self._slots[at].add_(gradient)
        self.written(at)

    def put_all(self, found: Sequence[Tensor | None]) -> None:
        """Take all gradients at once; None for a parameter without one."""
        given = {at: gradient for at, gradient in enumerate(found) if gradient is not None}
        if given:
            torch._foreach_copy_([self._slots[at] for at in given], list(given.values()))
            self._norms[_ALL] = [gradients.global_norm(list(given.values()))]
        self._put.update(given)

    def filled(self, others: Sequence[Tensor] = ()) -> Filled:
        """Return what the push holds. Slots without a gradient are set to zero.

        `others`: gradients that go with the push but have no slot (rows of tables).
        """
        norms = [norm for found in self._norms.values() for norm in found]
        norms += [gradients.global_norm([other]) for other in others]
        missing = [at for at in range(len(self._slots)) if at not in self._put]
        for at in missing:
            self._slots[at].zero_()
        square = sum(float(norm) ** 2 for norm in norms)
        # The squared norm may overflow although every gradient is finite.
        whole = (*self.found, *others)
        finite = math.isfinite(square) or all(bool(s.isfinite().all()) for s in whole)
        return Filled(self._begun, finite, square, missing)

    def end(self) -> None:
        """Drop the gradients of a push that is answered."""
        self.found = list(self._slots)

    def _is_put(self, at: int) -> None:
        self._put.add(at)
        self._servers.ready(at)

    def _alike(self, at: int, gradient: Tensor) -> bool:
        """Return whether a gradient lies in memory as its slot does."""
        alike = gradient.is_cpu and gradient.dtype == self._slots[at].dtype
        return alike and gradient.is_contiguous() and bool(self._pieces[at])

    def _give(self, at: int, gradient: Tensor) -> None:
        """Send a gradient from the memory it is in, without a copy."""
        self.found[at] = gradient
        self._servers.give(at, gradient.view(-1))


class Filled(NamedTuple):
    """A complete push: its row, and a summary of its gradients."""

    row: list[float]
    finite: bool
    square: float
    """Squared norm of all gradients."""
    missing: list[int]
    """Parameters without a gradient."""


# Gradients computed in place

LEAST = 1 << 20
"""Values of a weight that is worth it: below, calling Python in backward takes longer than the
copy."""
Slot = Callable[[], Tensor | None]
"""Returns where a gradient belongs, or None if it may not be written there now."""


def straighten(
    model: nn.Module,
    parameters: Sequence[Tensor],
    slot: Callable[[int], Tensor | None],
    written: Callable[[int], None],
) -> None:
    """Have large linear layers compute their weights' gradients in the slots.

    `slot` and `written` are called in backward, with the weight's index in `parameters`. A weight
    that is used elsewhere, too, gets the rest of its gradient the usual way, and later: autograd
    hands a parameter's gradient over only when all its uses are done.
    """
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
    """Undo `straighten`."""
    for layer in model.modules():
        found = vars(layer).get("forward")
        if isinstance(found, _Patched):
            give_back(layer, found.plain)


@dataclass(slots=True)
class _Patched:
    """Replaces a layer's forward by one whose backward computes the weight's gradient in place."""

    layer: nn.Linear
    weight: Tensor
    plain: Callable[[Tensor], Tensor]
    slot: Slot
    written: Callable[[], None]

    def __call__(self, input: Tensor) -> Tensor:
        if not self._is_ordinary(input):
            return self.plain(input)
        # Flat, because autograd forbids changing in place a view that a custom function returns.
        flat = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        found: Tensor = _Straight.apply(flat, self.weight, self.layer.bias, self)  # type: ignore[no-untyped-call]
        return found if flat is input else found.view(*input.shape[:-1], found.shape[-1])

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[nn.Linear, str]]:
        """Give a copy of the layer the forward of its class: the servers cannot be copied."""
        return getattr, (self.layer, "forward")

    def _is_ordinary(self, x: Tensor) -> bool:
        """Return whether plain autograd alone handles this call: no compiler, autocast, forward
        mode or functorch."""
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
    """Return the weight's gradient, or None if it was computed in its slot.

    A gradient that will be differentiated again (create_graph) never is.
    """
    slot = None if torch.is_grad_enabled() or _is_awaited(by.weight) else by.slot()
    if slot is None:
        return left @ right
    torch.mm(left, right, out=slot)
    by.written()
    return None


def _is_awaited(weight: Tensor) -> bool:
    """Return whether a hook of the user wants to see the gradient; one post-hook is ours."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks or ()) > 1
