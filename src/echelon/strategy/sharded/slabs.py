"""Complete weights in flat slabs; each member owns a slice of every slab.

    slab   [ 0 0 0 0 | 1 1 1 1 | 2 2 2 2 | 3 3 3 3 ]   parameters in a row, and their owners

`Slabs` holds the weights, `Reduction` sums gradients slab by slab and keeps this member's slices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from echelon.comm.buckets import Bucket, plan, slices, views
from echelon.comm.interface import Collective
from echelon.core.errors import TaskError
from echelon.strategy.all_reduce import came_twice
from echelon.strategy.optimizer_shards import Piece, in_row

SLAB = 8 << 20
"""Bytes of a slab; a larger parameter has one of its own."""


class Slabs:
    """The weights of `parameters` in slabs, and which of `count` members owns which slices."""

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
        """Return this member's slice of a slab."""
        return self.slices[number][self.index]

    def share(self, group: Collective) -> None:
        """Broadcast every member's slices to all members of the group."""
        for source in range(self.count):
            found = [flat[cut[source]] for flat, cut in zip(self.flats, self.slices, strict=True)]
            group.broadcast_([part for part in found if part.numel()], source)

    @torch.no_grad()
    def let_go(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each parameter memory of its own again, as in the user's model."""
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
    """Move a slab's parameters into flat memory. Only one slab at a time exists twice."""
    held = [parameters[at] for at in bucket.parameters]
    flat = torch.empty(bucket.size, dtype=bucket.dtype, device=held[0].device)
    order = range(len(held))
    alone = Bucket(bucket.dtype, tuple(order), bucket.offsets, bucket.size)
    for parameter, place in zip(held, views(held, [alone], [flat]), strict=True):
        place.copy_(parameter)
        parameter.data = place
    return flat


# Gradients on their way to their owners, slab by slab while backward goes on
#
#     backward ─▶ slab is full ─▶ sum over all members ─▶ owner keeps its slice, the rest is freed
#
# Slabs go in the same order on all members, whatever the order in which they get full, because all
# take part in every sum. No member ever holds more than a few of them.


class Reduction:
    """Adds up this member's slices of the gradients over the backward passes of an update."""

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
        """Reduce the remaining slabs after backward; missing gradients count as zero."""
        while self._next < len(self._lacking):
            self._reduce()
        self._fresh = False
        self._rewind()

    def clear(self) -> None:
        """Begin the next update."""
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
        """Return a slab's gradients in one row, and drop the parameters' own gradients."""
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
        """Return for each parameter the gradient of this member's piece, as views of `owned`."""
        found: dict[int, Tensor] = {}
        slabs = self._slabs
        for number, bucket in enumerate(slabs.buckets):
            first = slabs.mine(number).start
            for at, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                start, stop = slabs.pieces[at].ranges[slabs.index]
                inside = offset + start - first if start < stop else 0
                found[at] = self.owned[number][inside : inside + stop - start]
        return [found[at] for at in range(len(self._parameters))]


# Memory that is freed goes back to the system


LARGE = 1 << 20
"""Bytes."""
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in malloc.h


def give_back_large() -> None:
    """Return every buffer of a megabyte or more to the system as soon as it is freed.

    glibc takes a buffer of up to 32 MB from its heap once one of that size was freed, and between
    buffers that live on, memory for complete layers stays unusable: measured, members held three
    times what they needed. Other C libraries have neither this setting nor this habit.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, LARGE)
