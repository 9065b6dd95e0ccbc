"""Random numbers that belong to samples, not to workers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.hashing import key, words
from echelon.core.interfaces import Draws

_TAG = 2
"""Keeps draws apart from orders, which are hashed from (seed, epoch) too."""
_DROPPED = np.array(40, np.uint64)  # leaves the 24 bits that a float32 holds exactly


class PositionDraws:
    """Draws for the samples at these positions of an epoch's order."""

    def __init__(
        self,
        seed: int,
        epoch: int,
        positions: NDArray[np.int64],
        device: torch.device | None = None,
    ) -> None:
        self._seed = seed
        self._epoch = epoch
        self._positions = positions.view(np.uint64)
        self._device = device

    def uniform(self, draw: int) -> Tensor:
        """One float32 in [0, 1) per sample, a pure function of (seed, epoch, position, draw)."""
        drawn = words(self._positions, key(_TAG, self._seed, self._epoch, draw))
        drawn >>= _DROPPED
        numbers = torch.from_numpy(drawn.astype(np.float32)).mul_(2.0**-24)
        return numbers if self._device is None else numbers.to(self._device)


class OwnDraws:
    """Every `count`-th draw of another: so `count` users of one `Draws` never share a number."""

    def __init__(self, draws: Draws, index: int, count: int) -> None:
        self._draws = draws
        self._index = index
        self._count = count

    def uniform(self, draw: int) -> Tensor:
        return self._draws.uniform(draw * self._count + self._index)
