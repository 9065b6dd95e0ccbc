"""Layers that the model families share, and their names in a job.

The functions return one part of a network by its name in the options: an activation, a norm, an
initialization. `Normalise` is the first layer of a model: it takes raw values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from echelon.core.errors import TaskError
from echelon.core.types import Sparse

# Names in a job

ActivationName = Literal["relu", "leaky_relu", "gelu", "tanh", "sigmoid"]
NormName = Literal["none", "batch", "layer"]
InitName = Literal["he", "xavier", "orthogonal", "normal", "default"]
Rate = Annotated[float, Field(ge=0, lt=1)]
Sizes = tuple[PositiveInt, ...]


# Parts by name


def activation(name: ActivationName) -> nn.Module:
    match name:
        case "relu":
            return nn.ReLU()
        case "leaky_relu":
            return nn.LeakyReLU(_SLOPE)
        case "gelu":
            return nn.GELU()
        case "tanh":
            return nn.Tanh()
        case "sigmoid":
            return nn.Sigmoid()


def norm(name: NormName, features: int, *, images: bool = False) -> nn.Module | None:
    """Return batch or layer norm over `features` values, or over `features` channels of images."""
    match name:
        case "none":
            return None
        case "batch":
            return BatchNorm2d(features) if images else BatchNorm1d(features)
        case "layer":
            # One group: over all channels and places of a sample, as layer norm does.
            return nn.GroupNorm(1, features) if images else nn.LayerNorm(features)


def dropout(rate: float) -> nn.Module | None:
    return nn.Dropout(rate) if rate > 0 else None


def chain(*modules: nn.Module | None) -> nn.Sequential:
    """Return a sequence of the modules that are not None."""
    return nn.Sequential(*(module for module in modules if module is not None))


def dense_block(
    inputs: int,
    outputs: int,
    act: ActivationName,
    normed: NormName,
    rate: float,
    *,
    sparse: bool = False,
) -> nn.Sequential:
    """Return linear → norm → activation → dropout."""
    kind = SparseLinear if sparse else nn.Linear
    linear = kind(inputs, outputs, bias=normed != "batch")  # batch norm has a bias itself
    return chain(linear, norm(normed, outputs), activation(act), dropout(rate))


def initialise_(module: nn.Module, name: InitName, act: ActivationName = "relu") -> None:
    """Draw the weights of every linear and convolution layer; set their biases to 0.

    `he` and `orthogonal` are scaled for the activation that follows. `default` keeps torch's own
    initialization, biases included.
    """
    if name == "default":
        return
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d):
            _draw_(part.weight, name, act)
        elif isinstance(part, SparseLinear):
            _draw_(part.weight.t(), name, act)
        else:
            continue
        if part.bias is not None:
            nn.init.zeros_(part.bias)


def _draw_(weight: Tensor, name: InitName, act: ActivationName) -> None:
    curve: Literal["relu", "leaky_relu", "tanh", "sigmoid"] = "relu" if act == "gelu" else act
    if name == "he":
        nn.init.kaiming_normal_(weight, a=_SLOPE, nonlinearity=curve)
    elif name == "xavier":
        nn.init.xavier_uniform_(weight)
    elif name == "orthogonal":
        nn.init.orthogonal_(weight, nn.init.calculate_gain(curve))
    else:
        nn.init.normal_(weight, std=NORMAL_STD)


NORMAL_STD = 0.02
_SLOPE = 0.01


# Layers


class BatchNorm1d(nn.BatchNorm1d):
    """Batch norm that accepts a batch of one sample, as the last of an epoch may be.

    It is normalized with the running statistics, as in evaluation.
    """

    def forward(self, x: Tensor) -> Tensor:
        return _by_running_figures(self, x) if _is_lone(x) else super().forward(x)


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm that accepts a single image of one pixel, and uses running statistics for it."""

    def forward(self, x: Tensor) -> Tensor:
        return _by_running_figures(self, x) if _is_lone(x) else super().forward(x)


def _is_lone(x: Tensor) -> bool:
    """Return whether there is one value per channel, so no deviation; torch raises on that."""
    return x.numel() == x.shape[1]


def _by_running_figures(module: BatchNorm1d | BatchNorm2d, x: Tensor) -> Tensor:
    mean, var = module.running_mean, module.running_var
    return F.batch_norm(x, mean, var, module.weight, module.bias, False, 0.0, module.eps)


class Images(nn.Module):
    """[B, H, W] or [B, C, H, W] → [B, C, H, W], channels last in memory.

    In that layout convolutions take about a quarter less time on a CPU. The layers that follow
    keep the layout.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) if x.ndim == 3 else x
        return x.to(memory_format=torch.channels_last)


class SparseLinear(nn.Module):
    """A linear layer over `Sparse` rows: a weighted sum of the weight rows of their indices.

    The weight is stored as [inputs, outputs], so that the row of one input is contiguous.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        bound = inputs**-0.5  # as nn.Linear
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor | Sparse) -> Tensor:
        if isinstance(x, Tensor):
            return F.linear(x, self.weight.t(), self.bias)
        if x.width != len(self.weight):
            raise TaskError(
                f"sparse rows are {x.width} wide, but the model takes {len(self.weight)}"
            )
        rows = F.embedding_bag(
            x.indices,
            self.weight,
            x.offsets,
            mode="sum",
            per_sample_weights=x.values.to(self.weight.dtype),
            include_last_offset=True,
        )
        return rows if self.bias is None else rows + self.bias


Figures = float | Sequence[float] | Tensor


class Normalise(nn.Module):
    """(x - mean) / std, where each is one number, one per channel or one per feature.

    Takes bytes, integers and floats. Returns float32, or the dtype of autocast. A missing value
    (NaN) becomes the mean. A feature that never changes (std 0) is only centered.
    `Normalise(0.0, 1.0)` converts any input to floats and changes nothing else.
    """

    mean: Tensor
    inverse: Tensor

    def __init__(self, mean: Figures, std: Figures) -> None:
        super().__init__()
        mean_, std_ = _figures("mean", mean), _figures("std", std)
        if bool((std_ < 0).any()):
            raise TaskError(f"normalise: std is negative: {std_.min().item():g}")
        if mean_.ndim and std_.ndim and mean_.shape != std_.shape:
            raise TaskError(
                f"normalise: {len(mean_)} means and {len(std_)} deviations do not go together"
            )
        inverse = torch.where(std_ == 0, 1.0, 1 / std_)
        both = torch.stack([mean_ + 0 * inverse, inverse + 0 * mean_])  # as many of each
        self.register_buffer("mean", both[0].float())
        self.register_buffer("inverse", both[1].float())

    def forward(self, x: Tensor) -> Tensor:
        mean, inverse = self._beside(x)
        if x.is_floating_point():
            # Subtract before rounding to float32: a large mean must not cost precision.
            y = torch.nan_to_num(x - mean, nan=0.0, posinf=math.inf, neginf=-math.inf)
            y = y.float().mul(inverse)
        else:
            y = x.float().sub_(mean).mul_(inverse)
        kind = x.device.type
        return y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y

    def _beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and inverse deviation in a shape that broadcasts with `x`."""
        if self.mean.ndim == 0:
            return self.mean, self.inverse
        at = 1 if x.ndim == 4 else -1
        if x.shape[at] != len(self.mean):
            raise TaskError(
                f"normalise: {len(self.mean)} means do not fit samples of {tuple(x.shape[1:])}"
            )
        if at == 1:
            return self.mean.view(-1, 1, 1), self.inverse.view(-1, 1, 1)
        return self.mean, self.inverse


def _figures(what: str, value: Figures) -> Tensor:
    figures = torch.as_tensor(value, dtype=torch.float64)
    if figures.ndim > 1 or not bool(torch.isfinite(figures).all()):
        raise TaskError(f"normalise: {what} must be a finite number, or one per channel or feature")
    return figures
