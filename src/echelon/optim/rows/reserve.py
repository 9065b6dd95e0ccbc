"""Arrays that grow without being copied.

Addresses are reserved for more than will ever be used, and the system gives memory to them page by
page when they are first written. So nothing has to move when a table grows, and what is gathered
from is always one array.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.core.errors import TrainingError

MOST = (1 << 31) - 2
"""Slots are 32-bit numbers."""
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python names it from 3.13 on
_FIRST = 1 << 21
"""Bytes with ordinary pages: a small table should not take several large ones."""


class Column(NamedTuple):
    """What is kept for each slot: so many numbers (none: a single one) of a kind."""

    dtype: torch.dtype
    width: int | None = None

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * (1 if self.width is None else self.width)


def reserve(columns: Mapping[str, Column]) -> dict[str, Tensor]:
    """Zeros for as many slots as this machine could ever hold, all columns alike."""
    each = sum(column.nbytes for column in columns.values())
    slots = min(MOST, 2 * _physical() // each)
    while True:
        try:
            return {name: zeros(slots, column) for name, column in columns.items()}
        except OSError as error:  # a limit on addresses (ulimit -v), or strict accounting
            if slots < 1 << 16:
                raise TrainingError(f"no memory for a table of rows: {error}") from None
            slots //= 2


def _physical() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def zeros(slots: int, column: Column) -> Tensor:
    """For so many slots, in memory that is taken as it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, slots * column.nbytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE") and len(memory) > 2 * _FIRST:
        # Rows are gathered from all over: with small pages the addresses cost more than the data.
        memory.madvise(mmap.MADV_HUGEPAGE, _FIRST)
    whole = torch.frombuffer(memory, dtype=column.dtype, count=slots * (column.width or 1))
    return whole if column.width is None else whole.view(slots, column.width)
