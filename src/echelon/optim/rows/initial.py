"""First values of rows: pure functions of seed, table and id.

So they do not depend on who sees an id first, nor on how many servers share the table, and a row
that is not there yet can be read without being made.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from echelon.core.hashing import Words, key, words

_BLOCK = 1 << 13
_UNIT = np.float32(2.0**-23)


class Initial:
    """Evenly distributed around 0, with the spread `std`."""

    def __init__(self, seed: int, table: str, width: int, std: float) -> None:
        self._key = key(seed, zlib.crc32(table.encode()), len(table))
        self._width = width
        self._bound = np.float32(std * 3**0.5)
        self._lanes = np.arange(-(-width // 2), dtype=np.uint64)

    def __call__(self, ids: Tensor) -> Tensor:
        """[n, width]."""
        out = torch.zeros(len(ids), self._width)
        if self._bound:
            starts = words(ids.numpy().view(np.uint64), self._key)
            step = max(1, _BLOCK // len(self._lanes))
            for at in range(0, len(ids), step):
                self._fill(out[at : at + step].numpy(), starts[at : at + step])
        return out

    def _fill(self, out: np.ndarray[tuple[int, ...], np.dtype[np.float32]], starts: Words) -> None:
        """Two numbers of 24 bits from every word."""
        drawn = words((starts[:, None] + self._lanes).reshape(-1), self._key)
        bits = drawn.view(np.uint32).reshape(len(starts), -1)[:, : self._width]
        np.multiply(bits >> np.uint32(8), _UNIT, out=out, casting="unsafe")
        out -= np.float32(1.0)
        out *= self._bound
