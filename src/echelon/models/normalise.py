"""The first layer of a model: raw values in, values of mean 0 and deviation 1 out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.core.errors import TaskError

Figures = float | Sequence[float] | Tensor


class Normalise(nn.Module):
    """(x - mean) / std, where both are one number, one per channel or one per feature.

    Takes bytes, integers and floats, and gives float32, or what autocast computes in. A missing
    value (NaN) becomes the mean. A feature that never changes (std 0) is only centred.
    `Normalise(0.0, 1.0)` makes floats of any input and changes nothing else.
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
        """The figures, shaped to go with `x`: channels come before height and width."""
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
