"""Gradient slots, direct writes, measured merit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.autograd import forward_ad

from echelon.comm.interface import Collective
from echelon.comm.ps.client import Servers
from echelon.core.interfaces import BatchSource
from echelon.core.types import Batch
from echelon.data.batch import to_device
from echelon.optim import gradients
from echelon.strategy.model import give_back

# --- pushes ---
# One trainer's gradients on their way to the servers.

_PIECE = 1 << 18
"""Values copied at a time: their norm is taken while they are in the cache."""

_ALL = -1
"""Stands for all parameters together."""


class Filled(NamedTuple):
    """What is in the slots once all gradients are."""

    row: list[float]
    finite: bool
    square: float
    """Of the norm of all gradients."""
    missing: list[int]
    """Parameters without a gradient."""


class Pushes:
    """begin → put … put (or put_all) → filled; the servers read the slots when they are told to.

    What is computed into a slot, where there is `room`, is `written` instead of put.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._slots = servers.slots
        self._sends = servers.sends
        self.found = list(self._slots)
        """Where the gradients of the last push lie."""
        self._pieces = [
            slot.view(-1).split(_PIECE) if slot.is_contiguous() else () for slot in servers.slots
        ]
        self._begun: list[float] = []
        self._norms: dict[int, list[Tensor]] = {}
        """Per parameter, of the pieces of its gradient."""
        self._put: set[int] = set()

    def begin(self, row: Sequence[float]) -> None:
        """Before the update's last backward."""
        self._begun = list(row)
        self._norms, self._put = {}, set()
        self.end()

    def end(self) -> None:
        """The push is answered: nobody looks at its gradients any more."""
        self.found = list(self._slots)

    def put(self, at: int, gradient: Tensor) -> None:
        """The gradient of parameter `at` is final: it is looked at while it is in the cache."""
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
        """Where a gradient of this type may be computed into; `written` has to follow."""
        slot = self._slots[at]
        return slot if not self._sends and self._pieces[at] and slot.dtype == dtype else None

    def written(self, at: int) -> None:
        """The gradient is in its slot."""
        self._norms[at] = [gradients.global_norm([piece]) for piece in self._pieces[at]]
        self._is_put(at)

    def add(self, at: int, gradient: Tensor) -> None:
        """The rest of one that was `written`."""
        self._slots[at].add_(gradient)
        self.written(at)

    def _is_put(self, at: int) -> None:
        self._put.add(at)
        self._servers.ready(at)

    def put_all(self, found: Sequence[Tensor | None]) -> None:
        """All at once; None is no gradient."""
        given = {at: gradient for at, gradient in enumerate(found) if gradient is not None}
        if given:
            torch._foreach_copy_([self._slots[at] for at in given], list(given.values()))
            self._norms[_ALL] = [gradients.global_norm(list(given.values()))]
        self._put.update(given)

    def _alike(self, at: int, gradient: Tensor) -> bool:
        """Whether it lies in memory as its slot does."""
        alike = gradient.is_cpu and gradient.dtype == self._slots[at].dtype
        return alike and gradient.is_contiguous() and bool(self._pieces[at])

    def _give(self, at: int, gradient: Tensor) -> None:
        """It is sent from where it is."""
        self.found[at] = gradient
        self._servers.give(at, gradient.view(-1))

    def filled(self, others: Sequence[Tensor] = ()) -> Filled:
        """No gradient counts as one of zeros. `others` go with them, but have no slot."""
        norms = [norm for found in self._norms.values() for norm in found]
        norms += [gradients.global_norm([other]) for other in others]
        missing = [at for at in range(len(self._slots)) if at not in self._put]
        for at in missing:
            self._slots[at].zero_()
        square = sum(float(norm) ** 2 for norm in norms)
        # A norm may be too large a number where no gradient is.
        whole = (*self.found, *others)
        finite = math.isfinite(square) or all(bool(s.isfinite().all()) for s in whole)
        return Filled(self._begun, finite, square, missing)


# --- straight ---
# Gradients of large linear layers are born where the servers read them, and need no copy.
#
#     autograd:   backward ─▶ a new tensor ─▶ grad ─▶ copied to its slot
#     straight:   backward ─▶ its slot
#
# A weight that is used elsewhere, too, gets the rest of its gradient the usual way, and later:
# autograd hands over a parameter's gradient only when all its uses are done with.

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


# --- judge ---
# Each trainer measures what its own gradients do to held-out samples of all trainers.
#
#     held out of trainer 0 ─┐                      ┌─ cosine with the gradient of part 0 ─┐
# held out of trainer 1 ─┼─▶ every trainer ─▶ ──┼─ … of part 1                         ├─ median
# held out of trainer 2 ─┘                      └─ … of part 2 ────────────────────────┘
#
# So one whose samples are spoilt, the held-out ones too, is measured by what the others have, and
# can spoil no more than its own part. What becomes of a push with little merit is the gate's
# affair.

_MOST = 48
"""Numbers that say what a part looks like: enough for a dozen columns."""
LossOf = Callable[[Batch], tuple[Tensor, float]]


class Judge:
    def __init__(
        self,
        model: nn.Module,
        loss_of: LossOf,
        parameters: Sequence[Tensor],
        parts: Sequence[Batch],
        every: int = 1,
    ) -> None:
        self._model, self._loss_of = model, loss_of
        self._parameters = list(parameters)
        self._parts = list(parts)
        self._every = every
        self._seen = 0

    def merit(self, grads: Sequence[Tensor]) -> float:
        """The cosine of this gradient and that of the held-out samples; NaN if it is not its turn.

        Above 0 their loss falls with an update by `grads`, below it rises.
        """
        self._seen += 1
        if (self._seen - 1) % self._every:
            return math.nan
        training = self._model.training
        self._model.eval()  # batch statistics stay as they are
        try:
            return median(self._agreement(part, grads) for part in self._parts)
        finally:
            self._model.train(training)

    def _agreement(self, part: Batch, grads: Sequence[Tensor]) -> float:
        loss_sum, _ = self._loss_of(part)
        wanted = torch.autograd.grad(loss_sum, self._parameters, allow_unused=True)
        pairs = [(w, g) for w, g in zip(wanted, grads, strict=True) if w is not None]
        product = sum(float((w * g.to(w.device)).sum()) for w, g in pairs)
        lengths = _length([w for w, _ in pairs]) * _length(list(grads))
        return product / lengths if lengths > 0 else 0.0


def held_out(
    source: BatchSource, peers: Collective, samples: int, device: torch.device
) -> list[Batch]:
    """About so many held-out samples, a part from each trainer. All trainers call it together.

    Where parts of different shapes cannot be exchanged, each trainer has its own alone.
    """
    each = max(1, min(samples, len(source)) // peers.count)
    rows = torch.linspace(0, len(source) - 1, each * peers.count).long()[peers.index :: peers.count]
    mine = source.gather(rows)
    columns = {name: column for name, column in mine.items() if isinstance(column, Tensor)}
    if peers.count > 1 and _all_alike(peers, mine, columns):
        parts = [_from(peers, source_index, columns) for source_index in range(peers.count)]
    else:
        parts = [mine]
    return [to_device(part, device) for part in parts]


def _all_alike(peers: Collective, mine: Batch, columns: dict[str, Tensor]) -> bool:
    """Whether everybody's part has the same columns, in shape and kind."""
    tensors = [columns[name] for name in sorted(columns)]
    shape = [float(x) for held in tensors for x in (held.itemsize, held.ndim, *held.shape)]
    plain = len(columns) == len(mine) and len(shape) < _MOST
    shape = (shape + [0.0] * _MOST)[:_MOST]
    sums = peers.sum(shape)
    same = plain and all(total == peers.count * x for total, x in zip(sums, shape, strict=True))
    return peers.sum([float(not same)])[0] == 0


def _from(peers: Collective, source: int, columns: dict[str, Tensor]) -> Batch:
    names = sorted(columns)
    held = [columns[name].clone(memory_format=torch.contiguous_format) for name in names]
    peers.broadcast_(held, source)
    return dict(zip(names, held, strict=True))


def _length(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in tensors))
