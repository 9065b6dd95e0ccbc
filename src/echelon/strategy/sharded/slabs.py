"""Whole weights everywhere, in flat slabs; each member owns a slice of every slab.

slab   [ 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 ]   parameters one behind the other, and whose
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.comm.buckets import Bucket, plan, slices, views
from echelon.comm.interface import Collective
from echelon.strategy.sharded.pieces import Piece, in_row

SLAB = 8 << 20
"""Bytes; a larger parameter has a slab of its own."""


class Slabs:
    """The weights of these parameters, and who of `count` members owns which part of them."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], index: int, count: int
    ) -> None:
        self.index, self.count = index, count
        self.buckets = plan(parameters, SLAB)
        self.flats = [_moved(bucket, parameters) for bucket in self.buckets]
        self.slices = [slices(flat.numel(), flat.itemsize, count) for flat in self.flats]
        self.pieces: list[Piece] = [None] * len(parameters)  # type: ignore[list-item]
        for bucket, cuts in zip(self.buckets, self.slices, strict=True):
            for at, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                self.pieces[at] = self._piece(names[at], parameters[at], offset, cuts)

    def mine(self, number: int) -> slice:
        """This member's part of a slab."""
        return self.slices[number][self.index]

    def share(self, group: Collective) -> None:
        """Everybody's slices to everybody."""
        for source in range(self.count):
            found = [flat[cut[source]] for flat, cut in zip(self.flats, self.slices, strict=True)]
            group.broadcast_([part for part in found if part.numel()], source)

    @torch.no_grad()
    def let_go(self, parameters: Sequence[nn.Parameter]) -> None:
        """Each parameter in memory of its own again, as the user's model came."""
        for parameter in parameters:
            parameter.data = parameter.data.clone()

    def _piece(
        self, name: str, parameter: nn.Parameter, offset: int, cuts: Sequence[slice]
    ) -> Piece:
        size = parameter.numel()
        edges = [(cut.start - offset, cut.stop - offset) for cut in cuts]
        ranges = tuple((_within(low, size), _within(high, size)) for low, high in edges)
        start, stop = ranges[self.index]
        local = in_row(parameter)[start:stop]
        return Piece(name, parameter.shape, parameter.stride(), ranges, local)


def _within(edge: int, size: int) -> int:
    return min(max(edge, 0), size)


@torch.no_grad()
def _moved(bucket: Bucket, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Slab by slab: no more than one of them is there twice."""
    held = [parameters[at] for at in bucket.parameters]
    flat = torch.empty(bucket.size, dtype=bucket.dtype, device=held[0].device)
    order = range(len(held))
    alone = Bucket(bucket.dtype, tuple(order), bucket.offsets, bucket.size)
    for parameter, place in zip(held, views(held, [alone], [flat]), strict=True):
        place.copy_(parameter)
        parameter.data = place
    return flat
