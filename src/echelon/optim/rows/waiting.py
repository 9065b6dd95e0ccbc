"""Ids that were seen, but not often enough for a row of their own: a count each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.optim.rows.index import FIRST, NONE, Ids, Index, next_part
from echelon.optim.rows.reserve import Column, reserve

_COLUMNS = {
    "ids": Column(torch.int64),
    "counts": Column(torch.int32),
    "seen": Column(torch.int32),
}


class Waiting:
    """Admits an id when it has come `admit` times, none of them `expire` updates after another.

    The counts are exact: who is admitted, and when, must not depend on how many servers share a
    table, as it would with a sketch whose cells several ids share.
    """

    def __init__(self, admit: int, expire: int | None) -> None:
        memory = reserve(_COLUMNS)
        self._index = Index(memory["ids"])
        self._memory = memory
        self._counts: NDArray[np.int32] = memory["counts"].numpy()
        self._seen: NDArray[np.int32] = memory["seen"].numpy()
        self._admit, self._expire = admit, expire
        self._swept = FIRST

    def __len__(self) -> int:
        return self._index.count

    def admit(self, ids: Ids, counts: Ids, version: int) -> NDArray[np.bool_]:
        """Count these distinct ids; which of them are admitted. Those are no longer waiting."""
        slots = self._index.find(ids)
        before = self._counts[slots].astype(np.int64)
        if self._expire is not None:
            before[self._seen[slots] < version - self._expire] = 0
        now = before + counts
        ready: NDArray[np.bool_] = now >= self._admit
        gone = slots[ready & (slots != NONE)]
        self._forget(gone)
        fresh = ~ready & (slots == NONE)
        slots[fresh] = self._index.insert(ids[fresh])
        self._counts[slots[~ready]] = now[~ready]
        self._seen[slots[~ready]] = version
        return ready

    def sweep(self, version: int, count: int) -> None:
        """Forget those that came too long ago, among the next `count`."""
        assert self._expire is not None
        start, stop = next_part(self._swept, count, self._index.high)
        old = self._seen[start:stop] < version - self._expire
        old &= self._counts[start:stop] > 0
        self._forget(start + np.flatnonzero(old))
        self._swept = stop

    def _forget(self, slots: Ids) -> None:
        self._index.remove(slots)
        self._counts[slots] = 0

    @property
    def high(self) -> int:
        """All slots in use are below this."""
        return self._index.high

    def state(self) -> dict[str, Tensor]:
        return self.part(FIRST, self.high)

    def part(self, low: int, high: int) -> dict[str, Tensor]:
        """Of these slots."""
        used = slice(low, min(high, self.high))
        there = self._memory["counts"][used] > 0
        return {f"waiting_{name}": column[used][there] for name, column in self._memory.items()}

    def load(self, state: dict[str, Any]) -> None:
        ids = state["waiting_ids"].numpy()
        slots = self._index.insert(ids)
        self._counts[slots] = state["waiting_counts"].numpy()
        self._seen[slots] = state["waiting_seen"].numpy()
