"""Tensors as bytes, packed into loads of limited size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Load = list[tuple[int, Tensor]]
"""(Offset in the load, bytes)."""


def flat(tensor: Tensor) -> Tensor:
    """Its values in a row: the same memory if it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def put_back(tensor: Tensor, values: Tensor) -> None:
    """Undo `flat`."""
    if not tensor.is_contiguous():
        tensor.detach().copy_(values.view(tensor.shape))


def loads(flats: Sequence[Tensor], capacity: int) -> Iterator[Load]:
    """All bytes in order, cut where a load is full."""
    load: Load = []
    used = 0
    for values in flats:
        rest = values.view(torch.uint8)
        while rest.numel():
            if used == capacity:
                yield load
                load, used = [], 0
            piece, rest = rest[: capacity - used], rest[capacity - used :]
            load.append((used, piece))
            used += piece.numel()
    if load:
        yield load


def pack(load: Load, into: Tensor) -> None:
    for start, piece in load:
        into[start : start + piece.numel()].copy_(piece)


def unpack(load: Load, source: Tensor) -> None:
    for start, piece in load:
        piece.copy_(source[start : start + piece.numel()])
