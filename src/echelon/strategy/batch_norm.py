"""Batch norm over the samples of all members, as one process would see them.

torch's own SyncBatchNorm runs on GPUs only. This one runs wherever a collective does: two sums of
a few hundred numbers per layer, one in forward and one in backward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class Summing(Protocol):
    """The part of a collective that is needed here."""

    def sum_(self, tensor: Tensor) -> None: ...


def synchronise(model: nn.Module, collective: Summing) -> bool:
    """Let every batch norm of `model` see all members' samples; says whether there is any."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for layer in layers:
        # Patched rather than replaced: names and the user's own module stay what they are.
        layer.forward = functools.partial(_forward, layer, collective, layer.forward)  # type: ignore[method-assign]
    return bool(layers)


def unsynchronise(model: nn.Module) -> None:
    """Give the layers back as they came."""
    for module in model.modules():
        patched = module.__dict__.get("forward")
        if isinstance(patched, functools.partial) and patched.func is _forward:
            del module.__dict__["forward"]


def _forward(layer: _BatchNorm, collective: Summing, alone: Any, x: Tensor) -> Tensor:
    if not layer.training:
        evaluated: Tensor = alone(x)
        return evaluated
    with torch.no_grad():
        mean, var, count = _moments(x, collective)
    if count <= 1 and layer.running_mean is not None:  # nothing to compare a lone value with
        return _by_running_figures(layer, x) if x.numel() else x
    _follow(layer, mean, var, count)
    figures = _Figures(mean, var, count, layer.eps, collective)
    y: Tensor = _Normalised.apply(x, layer.weight, layer.bias, figures)  # type: ignore[no-untyped-call]
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
    collective: Summing


class _Normalised(torch.autograd.Function):
    """(x - mean) / std · weight + bias, where mean and std are those of all members' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        found: _Figures,
    ) -> Tensor:
        kind = torch.promote_types(x.dtype, torch.float32)
        figures = found.mean.to(kind), found.var.to(kind)
        ctx.save_for_backward(x, weight, *figures)
        ctx.found = found
        return F.batch_norm(x, *figures, weight, bias, training=False, eps=found.eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """As in evaluation, less what mean and variance owe to x: Σ dy and Σ dy·x̂ of all members.

        torch's kernel adds up in double precision, which these sums need: they nearly cancel out.
        """
        x, weight, mean, var = ctx.saved_tensors
        dy, around = gradient.contiguous(memory_format=_layout(x)), _around(x)
        if x.numel():
            dx, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, mean, var, None, None, False, ctx.found.eps, [True, True, True]
            )
        else:  # the kernel divides by the number of samples
            dx, d_weight, d_bias = dy, torch.zeros_like(mean), torch.zeros_like(mean)
        both = torch.stack([d_bias, d_weight]).double().cpu()
        ctx.found.collective.sum_(both)
        mean_dy, mean_dot = (both / max(ctx.found.count, 1)).to(x.device)
        deviation = (var.double() + ctx.found.eps).rsqrt()
        scale = deviation if weight is None else deviation * weight
        slope = mean_dot * deviation * scale
        # dx - scale·mean_dy - x̂·scale·mean_dot, with x̂ = (x - mean)·deviation
        shift = mean * slope - mean_dy * scale
        dx = dx.addcmul_(x, slope.to(dx.dtype).view(around), value=-1)
        dx = dx.add_(shift.to(dx.dtype).view(around))
        if weight is None:
            return dx, None, None, None
        return dx, d_weight, d_bias, None


def _moments(x: Tensor, collective: Summing) -> tuple[Tensor, Tensor, float]:
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
    collective.sum_(sums)
    count = max(float(sums[0, 0]), 1.0)
    mean = sums[1] / count
    var = (sums[2] / count - mean.square()).clamp_(min=0)
    return mean.to(x.device), var.to(x.device), float(sums[0, 0])


def _dims(x: Tensor) -> list[int]:
    return [at for at in range(x.ndim) if at != 1]


def _layout(x: Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _around(x: Tensor) -> list[int]:
    """The shape that puts one value per channel beside `x`."""
    return [-1 if at == 1 else 1 for at in range(x.ndim)]
