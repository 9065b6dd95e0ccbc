"""Which rows the last updates were about: what was read a moment ago can be brought up to date."""

from __future__ import annotations

from collections import deque

import numpy as np
from torch import Tensor

from echelon.optim.rows.index import Ids

_UPDATES = 32
_MOST = 1 << 20
"""Ids of all of them together."""


class Changes:
    """The ids of each update, the last few of them."""

    def __init__(self) -> None:
        self.turn = 0
        """Counts updates, and whatever else changes rows."""
        self._ids: deque[Ids] = deque()
        self._held = 0

    def add(self, ids: Tensor) -> None:
        """An update of these; the tensor must not change any more."""
        self.turn += 1
        self._ids.append(ids.numpy())
        self._held += len(ids)
        while len(self._ids) > _UPDATES or self._held > _MOST:
            self._held -= len(self._ids.popleft())

    def all(self) -> None:
        """Anything may be different now."""
        self.turn += 1
        self._ids.clear()
        self._held = 0

    def among(self, ids: Tensor, since: int) -> Ids | None:
        """Places of those that changed since that turn; None: nobody knows."""
        count = self.turn - since
        if not 0 <= count <= len(self._ids):
            return None
        wanted = ids.numpy()
        hit = np.zeros(len(wanted), np.bool_)
        for at in range(len(self._ids) - count, len(self._ids)):
            changed = self._ids[at]
            if not bool((changed[1:] > changed[:-1]).all()):
                return None
            near = np.searchsorted(changed, wanted)
            hit |= changed.take(near, mode="clip") == wanted
        return np.flatnonzero(hit)
