"""Members through a torch process group alone: between hosts, or between GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.comm.interface import MOST_VALUES, GradientSum
from echelon.comm.packing import flat, loads, pack, put_back, unpack
from echelon.comm.private import PrivateSum
from echelon.comm.wire import Wire

_LOAD = 25 * 1024 * 1024


class Remote:
    """`connect(name)` gives another group of the same members.

    A gradient sum needs its own: its sums begin whenever a bucket is full, and torch matches
    operations of a group by the order they are begun.
    """

    def __init__(self, connect: Callable[[str], Wire]) -> None:
        self._connect = connect
        self._wire = connect("main")
        self.index, self.count = self._wire.index, self._wire.count
        self._sums: list[PrivateSum] = []

    def sum(self, values: Sequence[float]) -> list[float]:
        assert len(values) <= MOST_VALUES, f"{len(values)} values at once"
        return [sum(column) for column in zip(*self._wire.gather(values), strict=True)]

    def sum_(self, tensor: Tensor) -> None:
        values = flat(tensor)
        sent = values.to(self._wire.device)  # NCCL takes nothing that lies elsewhere
        self._wire.end(self._wire.begin_sum(sent))
        if sent is not values:
            values.copy_(sent)
        put_back(tensor, values)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        broadcast_over(self._wire, tensors, source)

    def barrier(self) -> None:
        self._wire.gather([0.0])

    def gradients(self, parameters: Sequence[Tensor]) -> GradientSum:
        made = PrivateSum(self, parameters, self._connect(f"gradients{len(self._sums)}"))
        self._sums.append(made)
        return made

    def close(self) -> None:
        for made in self._sums:
            made.close()
        self._wire.close()


def broadcast_over(wire: Wire, tensors: Sequence[Tensor], source: int) -> None:
    """Many small tensors travel together."""
    flats = [flat(tensor) for tensor in tensors]
    for load in loads(flats, _LOAD):
        last, piece = load[-1]
        packed = torch.empty(last + piece.numel(), dtype=torch.uint8, device=wire.device)
        if wire.index == source:
            pack(load, packed)
        wire.broadcast_(packed, source)
        if wire.index != source:
            unpack(load, packed)
    for tensor, values in zip(tensors, flats, strict=True):
        put_back(tensor, values)
