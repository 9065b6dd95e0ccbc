"""Synchronised batch norm, padding passes.

Batch norm over the samples of all members, as one process would see them.

torch's own SyncBatchNorm runs on GPUs only. This one runs wherever a collective does: two sums of
a few hundred numbers per layer, one in forward and one in backward.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.interface import Collective
from echelon.core.errors import TaskError
from echelon.core.types import Batch, Column, Sparse
from echelon.data import batch as columns
from echelon.strategy.model import give_back

# --- batch_norm ---


class Summing(Protocol):
    """The part of a collective that is needed here."""

    count: int

    def sum_(self, tensor: Tensor) -> None: ...


@dataclass(slots=True)
class _Link:
    """A layer and the members it meets."""

    layer: _BatchNorm
    number: int
    collective: Summing
    alone: Callable[[Tensor], Tensor]
    """How the layer goes forward by itself."""
    always: bool
    """Whether members meet in evaluation, too."""
    present: bool = True
    """Whether what goes through is among the samples that count."""


def synchronise(model: nn.Module, collective: Summing, *, always: bool = False) -> bool:
    """Let every batch norm of `model` see all members' samples; says whether there is any.

    `always`: also in evaluation, where a layer that keeps no running statistics looks at samples.
    """
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for number, layer in enumerate(layers):
        link = _Link(layer, number, collective, layer.forward, always)
        # Patched rather than replaced: names and the user's own module stay what they are.
        layer.forward = functools.partial(_forward, link)  # type: ignore[method-assign]
    return bool(layers)


def looks_in_evaluation(model: nn.Module) -> bool:
    """Whether some batch norm of `model` has no statistics but those of the samples at hand."""
    return any(_looks(module) for module in model.modules() if isinstance(module, _BatchNorm))


def _looks(layer: _BatchNorm) -> bool:
    return layer.running_mean is None and layer.running_var is None


def unsynchronise(model: nn.Module) -> None:
    """Give the layers back as they came."""
    for link in _links(model):
        give_back(link.layer, link.alone)


def attend(model: nn.Module, present: bool) -> None:
    """Say whether what goes through the layers from now on counts, or only keeps step."""
    for link in _links(model):
        link.present = present


def _links(model: nn.Module) -> list[_Link]:
    found = [module.__dict__.get("forward") for module in model.modules()]
    return [f.args[0] for f in found if isinstance(f, functools.partial) and f.func is _forward]


def _forward(link: _Link, x: Tensor) -> Tensor:
    layer = link.layer
    if not layer.training and not (link.always and _looks(layer)):
        return link.alone(x)
    layer._check_input_dim(x)
    with torch.no_grad():
        mean, var, count = _moments(x if link.present else x[:0], link)
    if count <= 1 and layer.running_mean is not None:  # nothing to compare a lone value with
        return _by_running_figures(layer, x) if x.numel() else x
    _follow(layer, mean, var, count)
    figures = _Figures(mean, var, count, layer.eps, link.present)
    y: Tensor = _Normalised.apply(x, layer.weight, layer.bias, figures, link)  # type: ignore[no-untyped-call]
    return y


def _by_running_figures(layer: _BatchNorm, x: Tensor) -> Tensor:
    mean, var = layer.running_mean, layer.running_var
    return F.batch_norm(x, mean, var, layer.weight, layer.bias, False, 0.0, layer.eps)


@torch.no_grad()
def _follow(layer: _BatchNorm, mean: Tensor, var: Tensor, count: float) -> None:
    """Move the running statistics as torch does."""
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


@dataclass(frozen=True, slots=True)
class _Figures:
    """Of all members' values, per channel."""

    mean: Tensor
    var: Tensor
    count: float
    eps: float
    mine: bool
    """Whether the values at hand are among them."""


class _Normalised(torch.autograd.Function):
    """(x - mean) / std · weight + bias, where mean and std are those of all members' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        found: _Figures,
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
        """As in evaluation, less what mean and variance owe to x: Σ dy and Σ dy·x̂ of all members.

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


def _moments(x: Tensor, link: _Link) -> tuple[Tensor, Tensor, float]:
    """Mean, variance and number of values per channel, over all members, in double precision.

    A member may have no samples at all; it still takes part, for the others count on it.
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


def _sum_(values: Tensor, link: _Link, *, backward: bool) -> None:
    """Over all members, if all are in the same place: else numbers of two layers would be mixed.

    Only if all say the same number are Σ n = count · n and Σ n² = count · n².
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
    """The shape that puts one value per channel beside `x`."""
    return [-1 if at == 1 else 1 for at in range(x.ndim)]


# --- padding ---
# As many passes in every member: one that has no samples goes along with some that do not count.
#
# A batch without a single sample would not do: many a model and loss cannot take it.

_ROOM = 1 << 14


class Pad(dict[str, Column]):
    """A batch that keeps step with the others' and counts for nothing."""


class Padding:
    """Knows what samples look like, and how many passes there are."""

    def __init__(self, everybody: Collective, device: torch.device) -> None:
        self._everybody, self._device = everybody, device
        self._known: Pad | None = None

    def pads(self, micro: Sequence[Batch], passes: int) -> list[Pad]:
        """To go through after `micro`; the first time, all members call this together."""
        if self._known is None:
            self._known = self._told(_twice(micro[0]) if micro else None)
        missing = passes - len(micro)
        if missing <= 0:
            return []
        return [_twice(micro[0]) if micro else self._known] * missing

    def most(self, passes: int) -> int:
        """Of all members' numbers; called by all together."""
        board = torch.zeros(self._everybody.count, dtype=torch.int64)
        board[self._everybody.index] = passes
        self._everybody.sum_(board)
        return int(board.max())

    def _told(self, mine: Pad | None) -> Pad:
        """A sample of the first member that has one, for those that have none."""
        board = torch.zeros(self._everybody.count, _ROOM, dtype=torch.int64)
        if mine is not None:
            said = json.dumps(_described(mine)).encode()
            assert len(said) <= _ROOM, f"{len(said)} bytes to describe a batch"
            board[self._everybody.index, : len(said)] = torch.tensor(list(said))
        self._everybody.sum_(board)
        source, told = next((at, row) for at, row in enumerate(board.tolist()) if row[0])
        known = mine if source == self._everybody.index else None
        known = known or _made(json.loads(bytes(value for value in told if value)), self._device)
        self._everybody.broadcast_(
            [part for c in known.values() for part in columns.tensors(c)], source
        )
        return known


def _twice(batch: Batch) -> Pad:
    """Its first sample two times: of one alone, batch norm could not tell the variance."""
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
