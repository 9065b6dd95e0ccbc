"""Synchronized batch norm: statistics over all members' samples, as one process computes them.

torch's own SyncBatchNorm runs on GPUs only. This one runs wherever a collective does: two sums of
a few hundred numbers per layer, one in forward and one in backward.

Since all members take part in these sums, all have to make the same number of forward passes:
`Padding` provides batches that do not count for members that have fewer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.interface import Collective
from echelon.core.errors import TaskError
from echelon.core.types import Batch, Column, Sparse
from echelon.data import batch as columns
from echelon.strategy.model import give_back


def synchronise(model: nn.Module, collective: Collective, *, always: bool = False) -> bool:
    """Let every batch norm of `model` see all members' samples; return whether there is any.

    With `always`, layers without running statistics do so in evaluation, too.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for number, layer in enumerate(layers):
        link = _Link(layer, number, collective, layer.forward, always)
        # Patched rather than replaced: names and the user's own module do not change.
        layer.forward = functools.partial(_forward, link)  # type: ignore[method-assign]
    return bool(layers)


def looks_in_evaluation(model: nn.Module) -> bool:
    """Return whether some batch norm of `model` keeps no running statistics, so that it computes
    them from the samples in evaluation, too."""
    return any(_looks(module) for module in model.modules() if isinstance(module, _BatchNorm))


def _looks(layer: _BatchNorm) -> bool:
    return layer.running_mean is None and layer.running_var is None


def unsynchronise(model: nn.Module) -> None:
    """Restore the layers' own forward methods."""
    for link in _links(model):
        give_back(link.layer, link.alone)


def attend(model: nn.Module, present: bool) -> None:
    """Set whether samples that pass through the layers count from now on."""
    for link in _links(model):
        link.present = present


def _links(model: nn.Module) -> list[_Link]:
    found = [module.__dict__.get("forward") for module in model.modules()]
    return [f.args[0] for f in found if isinstance(f, functools.partial) and f.func is _forward]


@dataclass(slots=True)
class _Link:
    """A synchronized layer and the members that share its statistics."""

    layer: _BatchNorm
    number: int
    collective: Collective
    alone: Callable[[Tensor], Tensor]
    """The layer's own forward method."""
    always: bool
    """Whether to sum over all members in evaluation, too."""
    present: bool = True
    """Whether this member's samples count."""


def _forward(link: _Link, x: Tensor) -> Tensor:
    layer = link.layer
    if not layer.training and not (link.always and _looks(layer)):
        return link.alone(x)
    layer._check_input_dim(x)
    with torch.no_grad():
        mean, var, count = _moments(x if link.present else x[:0], link)
    if count <= 1 and layer.running_mean is not None:  # a single value has no variance
        return _by_running_statistics(layer, x) if x.numel() else x
    _move_running_statistics(layer, mean, var, count)
    moments = _Statistics(mean, var, count, layer.eps, link.present)
    y: Tensor = _Normalised.apply(x, layer.weight, layer.bias, moments, link)  # type: ignore[no-untyped-call]
    return y


def _by_running_statistics(layer: _BatchNorm, x: Tensor) -> Tensor:
    mean, var = layer.running_mean, layer.running_var
    return F.batch_norm(x, mean, var, layer.weight, layer.bias, False, 0.0, layer.eps)


@torch.no_grad()
def _move_running_statistics(layer: _BatchNorm, mean: Tensor, var: Tensor, count: float) -> None:
    """Update the running statistics as torch does."""
    if not layer.track_running_stats or layer.running_mean is None or layer.running_var is None:
        return
    assert layer.num_batches_tracked is not None
    layer.num_batches_tracked.add_(1)
    rate = layer.momentum
    if rate is None:
        rate = 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), rate)
    unbiased = var * (count / max(count - 1, 1))
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), rate)


def _moments(x: Tensor, link: _Link) -> tuple[Tensor, Tensor, float]:
    """Return mean, variance and number of values per channel over all members, in double precision.

    A member without samples takes part, too, because the others wait for it.
    """
    mine = x.numel() // x.shape[1]
    sums = torch.zeros(3, x.shape[1], dtype=torch.float64)
    if mine:
        var, mean = torch.var_mean(
            x if x.dtype == torch.float64 else x.float(), _dims(x), correction=0
        )
        mean, var = mean.double().cpu(), var.double().cpu()
        sums[0], sums[1], sums[2] = mine, mine * mean, mine * (var + mean.square())
    _sum_(sums, link, backward=False)
    count = max(float(sums[0, 0]), 1.0)
    mean = sums[1] / count
    var = (sums[2] / count - mean.square()).clamp_(min=0)
    return mean.to(x.device), var.to(x.device), float(sums[0, 0])


@dataclass(frozen=True, slots=True)
class _Statistics:
    """Mean, variance and number of all members' values, per channel."""

    mean: Tensor
    var: Tensor
    count: float
    eps: float
    mine: bool
    """Whether this member's values are among them."""


class _Normalised(torch.autograd.Function):
    """(x - mean) / std · weight + bias, with the mean and std of all members' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        found: _Statistics,
        link: _Link,
    ) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        mean, var = found.mean.to(kind), found.var.to(kind)
        ctx.kinds = [None if values is None else values.dtype for values in (weight, bias)]
        weight, bias = (None if values is None else values.to(kind) for values in (weight, bias))
        ctx.save_for_backward(x, weight, mean, var)
        ctx.found, ctx.link = found, link
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=found.eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of evaluation, minus what comes through mean and variance: terms
        with Σ dy and Σ dy·x̂ over all members.

        torch's kernel adds up in double precision, which these sums need: they nearly cancel out.
        """
        x, weight, mean, var = ctx.saved_tensors
        found, kind = ctx.found, x.dtype
        x = x.to(mean.dtype)  # half precision would round what nearly cancels out
        dy = gradient.to(mean.dtype).contiguous(memory_format=_layout(x))
        if x.numel():
            dx, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, mean, var, None, None, False, found.eps, [True, True, True]
            )
        else:  # the kernel divides by the number of samples
            dx, d_weight, d_bias = dy, torch.zeros_like(mean), torch.zeros_like(mean)
        both = torch.stack([d_bias, d_weight]).double().cpu()
        _sum_(both, ctx.link, backward=True)
        if found.mine:
            mean_dy, mean_dot = (both / max(found.count, 1)).to(x.device)
            deviation = (var.double() + found.eps).rsqrt()
            scale = deviation if weight is None else deviation * weight
            slope = mean_dot * deviation * scale
            # dx - scale·mean_dy - x̂·scale·mean_dot, with x̂ = (x - mean)·deviation
            shift, around = mean * slope - mean_dy * scale, _around(x)
            dx = dx.addcmul_(x, slope.to(dx.dtype).view(around), value=-1)
            dx = dx.add_(shift.to(dx.dtype).view(around))
        d_affine = zip((d_weight, d_bias), ctx.kinds, strict=True)
        own = [None if wanted is None else values.to(wanted) for values, wanted in d_affine]
        return dx.to(kind), *own, None, None


def _sum_(values: Tensor, link: _Link, *, backward: bool) -> None:
    """Sum over all members, and check that all are in the same layer and direction.

    Every member adds its layer's number n and n². Only if all have the same number are
    Σ n = count · n and Σ n² = count · n².
    """
    number = float(2 * link.number + 1 + backward)
    marks = torch.tensor([number, number * number], dtype=torch.float64)
    board = torch.cat([values.view(-1), marks])
    link.collective.sum_(board)
    if not torch.equal(board[-2:], marks * link.collective.count):
        raise TaskError(
            "members went through different layers: batch norm over all of them needs every "
            "member to use the same ones (sync.batch_norm: local does not)"
        )
    values.copy_(board[:-2].view_as(values))


def _dims(x: Tensor) -> list[int]:
    return [at for at in range(x.ndim) if at != 1]


def _layout(x: Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _around(x: Tensor) -> list[int]:
    """Return the shape that broadcasts one value per channel over `x`."""
    return [-1 if at == 1 else 1 for at in range(x.ndim)]


# Padding: every member makes the same number of passes
#
# A member without samples makes passes that do not count. A batch without a single sample would not
# do: many models and losses cannot take one.


_ROOM = 1 << 14
"""Bytes for the description of a batch."""


class Pad(dict[str, Column]):
    """A batch whose samples do not count: it only makes a pass along with the other members."""


class Padding:
    """Makes pads from this member's samples, or from another member's if it has none."""

    def __init__(self, everybody: Collective, device: torch.device) -> None:
        self._everybody, self._device = everybody, device
        self._known: Pad | None = None

    def pads(self, micro: Sequence[Batch], passes: int) -> list[Pad]:
        """Return the pads to make after `micro`. All members make the first call together."""
        if self._known is None:
            self._known = self._shared(_twice(micro[0]) if micro else None)
        missing = passes - len(micro)
        if missing <= 0:
            return []
        return [_twice(micro[0]) if micro else self._known] * missing

    def most(self, passes: int) -> int:
        """Return the largest number of passes of any member. All members call this together."""
        board = torch.zeros(self._everybody.count, dtype=torch.int64)
        board[self._everybody.index] = passes
        self._everybody.sum_(board)
        return int(board.max())

    def _shared(self, mine: Pad | None) -> Pad:
        """Broadcast a pad of the first member that has samples, and return it."""
        board = torch.zeros(self._everybody.count, _ROOM, dtype=torch.int64)
        if mine is not None:
            said = json.dumps(_described(mine)).encode()
            assert len(said) <= _ROOM, f"{len(said)} bytes to describe a batch"
            board[self._everybody.index, : len(said)] = torch.tensor(list(said))
        self._everybody.sum_(board)
        source, row = next((at, words) for at, words in enumerate(board.tolist()) if words[0])
        known = mine if source == self._everybody.index else None
        known = known or _made(json.loads(bytes(value for value in row if value)), self._device)
        self._everybody.broadcast_(
            [part for c in known.values() for part in columns.tensors(c)], source
        )
        return known


def _twice(batch: Batch) -> Pad:
    """Return the first sample twice, because batch norm needs two values for a variance."""
    first = torch.zeros(2, dtype=torch.int64)
    return Pad({name: columns.take(column, first) for name, column in batch.items()})


def _described(batch: Batch) -> dict[str, Any]:
    return {
        name: [column.width if isinstance(column, Sparse) else None, _shapes(column)]
        for name, column in batch.items()
    }


def _shapes(column: Column) -> list[tuple[str, list[int]]]:
    parts = columns.tensors(column)
    return [(str(part.dtype).removeprefix("torch."), list(part.shape)) for part in parts]


def _made(described: dict[str, Any], device: torch.device) -> Pad:
    made = Pad()
    for name, (width, shapes) in described.items():
        parts = [_room(kind, shape, device) for kind, shape in shapes]
        made[name] = parts[0] if width is None else Sparse(parts[0], parts[1], parts[2], width)
    return made


def _room(kind: str, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.zeros(*shape, dtype=getattr(torch, kind), device=device)
