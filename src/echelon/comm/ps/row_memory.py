"""Memory that a trainer shares with a shard on its host, through which rows of tables travel.

    area 0      ids ┊ rows             the trainer asks, the shard fills in the rows
    area 1      ids ┊ sums ┊ counts    gradients, for each table of a push, until its outcome
    area 2, 3   ids ┊ rows             of batches to come, in turn, for each table

An area that has become too small is replaced by a larger one. `carve` and the shapes are for both
ends; `RowRoom` is the trainer's end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from echelon.comm.channel import Segment
from echelon.comm.ps.link import Link
from echelon.comm.ps.messages import Kind
from echelon.core.errors import PeerError

PULLS, PUSHES, AHEAD = 0, 1, 2
AREAS = 4
LARGEST = 1 << 40
"""Bytes of an area, at most."""
_SMALLEST = 1 << 20
_ALIGNMENT = 64

Shape = tuple[np.dtype[Any], tuple[int, ...]]
_INT64, _INT32, _FLOAT = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32)


class RowRooms:
    """The shared memory of all links of a trainer."""

    def __init__(self) -> None:
        self._rooms: dict[int, RowRoom] = {}

    def of(self, link: Link) -> RowRoom:
        found = self._rooms.get(link.address.index)
        if found is None or found.link is not link:
            found = self._rooms[link.address.index] = RowRoom(link)
        return found


class RowRoom:
    """The areas that a trainer shares with one shard."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._areas = [torch.empty(0, dtype=torch.uint8) for _ in range(AREAS)]
        self._used = [(0, 0)] * AREAS
        """Per area, the turn that `more` used it in last, and how many bytes."""

    def area(self, number: int, size: int) -> Tensor:
        """Return an area of at least `size` bytes: new memory, if the old one is too small."""
        if self._areas[number].nbytes < size:
            segment = Segment.create(max(_SMALLEST, 2 * size))
            try:
                head = {"area": number, "size": segment.size}
                self.link.share(Kind.ROW_ROOM, head, segment, "memory for rows being mapped")
            finally:
                segment.close()
            self._areas[number] = segment.tensor
        return self._areas[number]

    def more(self, number: int, turn: int, size: int) -> tuple[Tensor, int]:
        """Reserve `size` bytes of an area for this turn; return the memory and a place in it.

        If the area is too small it is replaced; places given out before stay valid, because they
        are in the old memory.
        """
        before, used = self._used[number]
        if before != turn:
            used = 0
        if used + size > self._areas[number].nbytes:
            self.area(number, used + size)
            used = 0
        self._used[number] = turn, used + size
        return self._areas[number], used


def pull_shapes(size: int, width: int) -> list[Shape]:
    return [(_INT64, (size,)), (_FLOAT, (size, width))]


def push_shapes(size: int, width: int, counted: bool) -> list[Shape]:
    counts: list[Shape] = [(_INT32, (size,))] if counted else []
    return [*pull_shapes(size, width), *counts]


def carve(memory: Tensor, place: int, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return tensors of these shapes from `place` on, which a peer may have chosen: check it."""
    if place % _ALIGNMENT or place + room_for(shapes) > memory.nbytes:
        raise PeerError(f"rows at {place} of {memory.nbytes:,} bytes of shared memory")
    whole, found = memory.numpy(), []
    for shape in shapes:  # NumPy makes such a view in one call, torch in three
        found.append(torch.from_numpy(np.ndarray(shape[1], shape[0], whole, place)))
        place += _room(shape)
    return found


def room_for(shapes: Sequence[Shape]) -> int:
    """Return the bytes of tensors of these shapes, one behind the other."""
    return sum(map(_room, shapes))


def _room(shape: Shape) -> int:
    size = math.prod(shape[1], start=shape[0].itemsize)
    return -(-size // _ALIGNMENT) * _ALIGNMENT
