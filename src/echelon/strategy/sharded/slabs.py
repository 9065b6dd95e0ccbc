"""Flat shards, reduce-scatter.

Whole weights everywhere, in flat slabs; each member owns a slice of every slab.

slab   [ 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 ]   parameters one behind the other, and whose
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.comm.buckets import Bucket, plan, slices, views
from echelon.comm.interface import Collective
from echelon.core.errors import TaskError
from echelon.strategy.all_reduce import came_twice
from echelon.strategy.optimizer_shards import Piece, in_row

# --- slabs ---

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


# --- reduction ---
# Gradients on their way to their owners, slab by slab while backward goes on.
#
#     backward ─▶ slab is full ─▶ summed over all members ─▶ owner keeps its slice, the rest is
# freed
#
# Slabs go in the same order on all members, whatever the order in which they get full, for all
# take part in every sum. No member ever holds more than a few of them.


class Reduction:
    """Adds up, over the backward passes of an update, what this member owns of the gradients."""

    def __init__(
        self, everybody: Collective, parameters: Sequence[nn.Parameter], slabs: Slabs
    ) -> None:
        self._everybody, self._parameters, self._slabs = everybody, parameters, slabs
        self.owned = [
            torch.zeros_like(flat[slabs.mine(number)]) for number, flat in enumerate(slabs.flats)
        ]
        self.parts = self._parts()
        self.seen = bytearray(len(parameters))
        """Whether this member had a gradient for a parameter in this update."""
        self._bucket_of = {
            at: number for number, bucket in enumerate(slabs.buckets) for at in bucket.parameters
        }
        self._lacking: list[int] = []
        self._next = 0
        self._fresh = True
        self._rewind()
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._ready, at))
            for at, parameter in enumerate(parameters)
        ]

    def flush(self) -> None:
        """Backward is over: whatever has no gradient here counts as zero."""
        while self._next < len(self._lacking):
            self._reduce()
        self._fresh = False
        self._rewind()

    def clear(self) -> None:
        """The next update begins."""
        self._fresh = True
        self.seen = bytearray(len(self.seen))

    def _ready(self, at: int, _parameter: Tensor) -> None:
        if self._here[at]:
            raise TaskError(came_twice(self._slabs.pieces[at].name))
        self._here[at] = 1
        self._lacking[self._bucket_of[at]] -= 1
        while self._next < len(self._lacking) and not self._lacking[self._next]:
            self._reduce()

    def _rewind(self) -> None:
        self._lacking = [len(bucket.parameters) for bucket in self._slabs.buckets]
        self._here = bytearray(len(self._parameters))
        self._next = 0

    @torch.no_grad()
    def _reduce(self) -> None:
        number, self._next = self._next, self._next + 1
        flat = self._gathered(number)
        self._everybody.sum_(flat)
        mine = flat[self._slabs.mine(number)]
        if self._fresh:
            self.owned[number].copy_(mine)
        else:
            self.owned[number].add_(mine)

    def _gathered(self, number: int) -> Tensor:
        """A slab's gradients one behind the other; they are not kept elsewhere."""
        bucket = self._slabs.buckets[number]
        held = [self._parameters[at] for at in bucket.parameters]
        found = [parameter.grad for parameter in held]
        for at, parameter in zip(bucket.parameters, held, strict=True):
            self.seen[at] |= parameter.grad is not None
            parameter.grad = None
        first = found[0]
        if len(held) == 1 and first is not None and first.stride() == held[0].stride():
            return in_row(first)
        flat = torch.zeros_like(self._slabs.flats[number])
        for offset, parameter, gradient in zip(bucket.offsets, held, found, strict=True):
            if gradient is not None:
                flat.as_strided(parameter.shape, parameter.stride(), offset).copy_(gradient)
        return flat

    def _parts(self) -> list[Tensor]:
        """Per parameter, the gradient of this member's piece of it."""
        found: dict[int, Tensor] = {}
        slabs = self._slabs
        for number, bucket in enumerate(slabs.buckets):
            first = slabs.mine(number).start
            for at, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                start, stop = slabs.pieces[at].ranges[slabs.index]
                inside = offset + start - first if start < stop else 0
                found[at] = self.owned[number][inside : inside + stop - start]
        return [found[at] for at in range(len(self._parameters))]
