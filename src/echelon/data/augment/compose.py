"""One augmentation after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.config.sections import AugmentSection
from echelon.core.interfaces import Augment, Draws
from echelon.core.types import Batch
from echelon.data.augment.images import Crop, Cutout, Flip
from echelon.data.augment.mixup import Mixup
from echelon.data.draws import OwnDraws


@dataclass(frozen=True)
class Compose:
    """One after the other, each with random numbers of its own."""

    parts: Sequence[Augment]

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        for index, part in enumerate(self.parts):
            batch = part(batch, OwnDraws(draws, index, len(self.parts)))
        return batch


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
