"""Changes made to whole batches of training samples, drawn from (seed, epoch, position).

Every one is a pure function of (batch, draws) that changes the column `x` and, but for
`Normalise`, keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.core.config.data import AugmentSection
from echelon.core.protocols import Augment, Draws
from echelon.core.types import Batch
from echelon.data.augment_images import Crop, Cutout, Flip
from echelon.data.augment_mix import Mixup
from echelon.data.batch import dense
from echelon.data.draws import OwnDraws

__all__ = ["Compose", "Crop", "Cutout", "Flip", "Mixup", "Normalise", "from_section"]


@dataclass(frozen=True)
class Compose:
    """One after the other, each with random numbers of its own."""

    parts: Sequence[Augment]

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        for index, part in enumerate(self.parts):
            batch = part(batch, OwnDraws(draws, index, len(self.parts)))
        return batch


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
        return {**batch, "x": (x - mean).mul_(self._factor.to(x.device).view(shape))}


def from_section(section: AugmentSection) -> Augment | None:
    """The augmentation that a job asks for."""
    parts: list[Augment] = []
    if section.crop:
        parts.append(Crop(section.crop))
    if section.flip:
        parts.append(Flip())
    if section.cutout:
        parts.append(Cutout(section.cutout))
    if section.mixup:
        parts.append(Mixup(section.mixup))
    return Compose(tuple(parts)) if parts else None
