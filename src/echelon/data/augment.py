"""Random changes to whole batches of training samples: crop, flip, cutout, mixup.

An augmentation is a pure function of (batch, draws) that changes the column `x`. Its random numbers
belong to the samples' positions in the epoch (`Draws`), so a sample is changed in the same way on
every worker and after every resume. All of them keep the dtype of `x`, except `Normalise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from echelon.core.config.sections import AugmentSection
from echelon.core.errors import TaskError
from echelon.core.interfaces import Augment, Draws
from echelon.core.types import Batch
from echelon.data.batch import dense


def from_section(section: AugmentSection) -> Augment | None:
    """Return the augmentation of a job's `augment` section, or None."""
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


@dataclass(frozen=True)
class Compose:
    """Several augmentations in order, each with random numbers of its own."""

    parts: Sequence[Augment]

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        for index, part in enumerate(self.parts):
            batch = part(batch, OwnDraws(draws, index, len(self.parts)))
        return batch


class OwnDraws:
    """Every `count`-th draw of another `Draws`, so that its `count` users never share a number."""

    def __init__(self, draws: Draws, index: int, count: int) -> None:
        self._draws = draws
        self._index = index
        self._count = count

    def uniform(self, draw: int) -> Tensor:
        return self._draws.uniform(draw * self._count + self._index)


# Images: [B, H, W] or [B, C, H, W], bytes or floats


@dataclass(frozen=True)
class Crop:
    """Pad every side by `padding` zeros and cut out the old size at a random place."""

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


def _windows(planes: Tensor, top: Tensor, left: Tensor, size: tuple[int, int]) -> Tensor:
    """Return one window [H, W] per image of planes [B, C, ·, ·], gathered line by line."""
    B, C, high, wide = planes.shape
    H, W = size
    lines = planes.as_strided((planes.numel() - W + 1, W), (1, 1))
    plane = torch.arange(B * C, device=planes.device).view(B, C, 1) * high
    line = plane + top.view(B, 1, 1) + torch.arange(H, device=planes.device)
    return lines.index_select(0, (line * wide + left.view(B, 1, 1)).view(-1))


@dataclass(frozen=True)
class Flip:
    """Mirror each image left to right with probability ½."""

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        x = _images(batch, "flip")
        chosen = (draws.uniform(0) < 0.5).nonzero().view(-1)
        # Half the work of `where`, which would mirror every image and then choose.
        return {**batch, "x": x.index_copy(0, chosen, x.index_select(0, chosen).flip(-1))}


@dataclass(frozen=True)
class Cutout:
    """Blank a square with sides of `size` pixels, which may extend beyond the image."""

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
        """Return which of the `side` lines the square covers; its middle is on any of them."""
        first = _whole(drawn, side) - self.size // 2
        line = torch.arange(side, device=drawn.device) - first[:, None]
        return (line >= 0) & (line < self.size)


def _images(batch: Batch, what: str) -> Tensor:
    x = dense(batch, "x")
    if x.ndim not in (3, 4):
        raise TaskError(
            f"augment.{what} is for images [B, H, W] or [B, C, H, W], and x is {list(x.shape)}"
        )
    return x


def _whole(drawn: Tensor, count: int) -> Tensor:
    """Turn draws in [0, 1) into integers below `count`."""
    # The product of a draw just below 1 may round up to `count`.
    return (drawn * count).long().clamp_(max=count - 1)


# Blending samples


@dataclass(frozen=True)
class Mixup:
    """Blend each sample with its neighbor in the batch, with a share from Beta(alpha, alpha).

    Samples 2i and 2i + 1 of a batch are partners (the order is shuffled, so any pairing is as
    good); the last sample of an odd batch stays as it is. If the target `y` is a class, it stays,
    and two columns are added: `y2`, the partner's class, and `mix`, the weight of `y`. So a loss
    remains a (sum, weight) pair: Σ mix·loss(y) + (1 − mix)·loss(y2), over the batch size. A target
    of floats is blended like `x`.
    """

    alpha: float

    def __call__(self, batch: Batch, draws: Draws) -> Batch:
        x, y = dense(batch, "x"), dense(batch, "y")
        share = _beta(self.alpha, draws.uniform(0), draws.uniform(1))
        partner = torch.arange(len(x), device=x.device) ^ 1
        partner[-1].clamp_(max=len(x) - 1)
        mixed = {**batch, "x": _blend(x, x.index_select(0, partner), share)}
        if y.is_floating_point():
            return {**mixed, "y": _blend(y, y.index_select(0, partner), share)}
        return {**mixed, "y2": y.index_select(0, partner), "mix": share}


def _beta(alpha: float, first: Tensor, second: Tensor) -> Tensor:
    """Return numbers distributed exactly as Beta(alpha, alpha), each from two uniform numbers.

    t² = (u^(−1/alpha) − 1)·cos²(2πv) is the square of a Student's t with 2·alpha degrees of
    freedom, divided by 2·alpha. Then ½ ± ½/√(1 + 1/t²) is a symmetric beta (Devroye 1996). In
    double precision, because a small alpha needs the far ends.
    """
    u, v = 1 - first.double(), second.double()
    cosine = torch.cos(2 * math.pi * v)
    squared = (torch.expm1(-u.log() / alpha) * cosine.square()).abs()  # never −0
    return (0.5 + 0.5 * cosine.sign() / (1 + 1 / squared).sqrt()).float()


def _blend(own: Tensor, other: Tensor, share: Tensor) -> Tensor:
    share = share.view(-1, *[1] * (own.ndim - 1))
    mixed = torch.lerp(other.float(), own.float(), share)
    return mixed.to(own.dtype) if own.is_floating_point() else mixed.round_().to(own.dtype)


# Scaling


class Normalise:
    """Subtract the mean and divide by the standard deviation, per channel or per feature.

    The result is float32.
    """

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        self._mean = torch.as_tensor(mean, dtype=torch.float32)
        self._factor = 1 / torch.as_tensor(std, dtype=torch.float32)

    def __call__(self, batch: Batch, draws: Draws) -> Batch:  # noqa: ARG002
        x = dense(batch, "x")
        # Means [C] of images [B, C, H, W] apply to whole planes.
        shape = (-1, 1, 1) if x.ndim == 4 and self._mean.ndim == 1 else self._mean.shape
        mean = self._mean.to(x.device).view(shape)
        factor = self._factor.to(x.device).view(shape)
        # One copy, then in place: takes three quarters of the time of three new tensors.
        return {**batch, "x": x.to(torch.float32, copy=True).sub_(mean).mul_(factor)}
