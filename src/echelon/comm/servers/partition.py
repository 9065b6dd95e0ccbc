"""Which shard holds which stretch of the flats: even shares of bytes, large tensors cut up.

flats     │ 0 · · · · · · · · · · · · · · │ 1 · · · │
shards    │ 0           │ 1               │         │      cut at cache lines
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from echelon.comm.servers.layout import ALIGN, Layout, Slot


@dataclass(frozen=True, slots=True)
class Range:
    """Values [start, stop) of a flat."""

    flat: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """What one shard holds of one parameter."""

    shard: int
    range: int
    """Which of the shard's ranges."""
    offset: int
    """Where it begins in that range."""
    start: int
    """Where it begins among the parameter's own values, as they lie in memory."""
    size: int


class Partition:
    """The flats of a layout over so many shards. A small model may leave some with nothing."""

    def __init__(self, layout: Layout, shards: int) -> None:
        assert shards > 0, f"{shards} shards"
        self.layout = layout
        self.shards = shards
        lines = layout.bytes // ALIGN
        cuts = [lines * shard // shards * ALIGN for shard in range(shards + 1)]
        self._ranges = [list(_between(layout, *pair)) for pair in pairwise(cuts)]
        self._pieces = [list(self._cut(slot)) for slot in layout.slots]

    def ranges(self, shard: int) -> list[Range]:
        return self._ranges[shard]

    def dtypes(self, shard: int) -> list[torch.dtype]:
        return [self.layout.flats[r.flat].dtype for r in self._ranges[shard]]

    def pieces(self, at: int) -> list[Piece]:
        """Where parameter `at` lies: one piece, unless it is cut up."""
        return self._pieces[at]

    def bytes(self, shard: int) -> int:
        """Of one copy of the shard's ranges, one behind the other."""
        flats = self.layout.flats
        return sum(r.size * flats[r.flat].dtype.itemsize for r in self._ranges[shard])

    def empty(self, shard: int) -> list[Tensor]:
        """New memory for the shard's ranges, not filled."""
        return self.carve(shard, torch.empty(self.bytes(shard), dtype=torch.uint8))

    def carve(self, shard: int, memory: Tensor) -> list[Tensor]:
        """The shard's ranges in bytes of memory, one behind the other."""
        found, start = [], 0
        for held, dtype in zip(self._ranges[shard], self.dtypes(shard), strict=True):
            stop = start + held.size * dtype.itemsize
            found.append(memory[start:stop].view(dtype))
            start = stop
        return found

    def cut(self, shard: int, flats: Sequence[Tensor]) -> list[Tensor]:
        """The shard's ranges in whole flats."""
        return [flats[r.flat][r.start : r.stop] for r in self._ranges[shard]]

    def _cut(self, slot: Slot) -> Iterator[Piece]:
        for shard, ranges in enumerate(self._ranges):
            for at, held in enumerate(ranges):
                start, stop = max(slot.start, held.start), min(slot.stop, held.stop)
                if held.flat == slot.flat and start < stop:
                    yield Piece(shard, at, start - held.start, start - slot.start, stop - start)


def _between(layout: Layout, first: int, last: int) -> Iterator[Range]:
    """What lies in bytes [first, last) of all flats one behind the other."""
    begin = 0
    for at, flat in enumerate(layout.flats):
        low, high = max(first, begin), min(last, begin + flat.bytes)
        if low < high:
            size = flat.dtype.itemsize
            yield Range(at, (low - begin) // size, (high - begin) // size)
        begin += flat.bytes
