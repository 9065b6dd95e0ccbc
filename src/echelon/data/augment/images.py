"""Augmentation of images [B, H, W] or [B, C, H, W], of bytes or floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from echelon.core.errors import TaskError
from echelon.core.interfaces import Draws
from echelon.core.types import Batch
from echelon.data.batch import dense


@dataclass(frozen=True)
class Crop:
    """Pad by `padding` zeros on every side and cut out the old size at a random place."""

    padding: int

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        x = _images(batch, "crop")
        B, H, W = len(x), x.shape[-2], x.shape[-1]
        places = 2 * self.padding + 1
        top = _whole(draws.uniform(0), places)
        left = _whole(draws.uniform(1), places)
        padded = pad(x, (self.padding,) * 4)
        planes = padded.view(B, -1, *padded.shape[-2:])
        return {**batch, "x": _windows(planes, top, left, (H, W)).view(x.shape)}


@dataclass(frozen=True)
class Flip:
    """Mirror about every second image left to right."""

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        x = _images(batch, "flip")
        chosen = (draws.uniform(0) < 0.5).nonzero().view(-1)
        # Half the work of choosing between an image and its mirror image with `where`.
        return {**batch, "x": x.index_copy(0, chosen, x.index_select(0, chosen).flip(-1))}


@dataclass(frozen=True)
class Cutout:
    """Blank a square with sides of `size` pixels; it may stick out over the edge."""

    size: int
    value: float = 0.0

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        x = _images(batch, "cutout")
        H, W = x.shape[-2:]
        rows = self._covered(draws.uniform(0), H)
        columns = self._covered(draws.uniform(1), W)
        hidden = rows[:, :, None] & columns[:, None, :]
        if x.ndim == 4:
            hidden = hidden[:, None]
        return {**batch, "x": x.masked_fill(hidden, self.value)}

    def _covered(self, drawn: Tensor, side: int) -> Tensor:
        """Which of the `side` lines the square covers, with its middle on any of them."""
        first = _whole(drawn, side) - self.size // 2
        line = torch.arange(side, device=drawn.device) - first[:, None]
        return (line >= 0) & (line < self.size)


def _windows(planes: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """A window of this size from each image of [B, C, ·, ·] planes, as a gather of whole lines."""
    B, C, high, wide = planes.shape
    H, W = size
    lines = planes.as_strided((planes.numel() - W + 1, W), (1, 1))
    plane = torch.arange(B * C, device=planes.device).view(B, C, 1) * high
    line = plane + top.view(B, 1, 1) + torch.arange(H, device=planes.device)
    return lines.index_select(0, (line * wide + left.view(B, 1, 1)).view(-1))


def _whole(drawn: Tensor, count: int) -> Tensor:
    """One of `count` whole numbers. The product of a draw just below 1 may round up to `count`."""
    return (drawn * count).long().clamp_(max=count - 1)


def _images(batch: Batch, what: str) -> Tensor:
    x = dense(batch, "x")
    if x.ndim not in (3, 4):
        raise TaskError(
            f"augment.{what} is for images [B, H, W] or [B, C, H, W], and x is {list(x.shape)}"
        )
    return x
