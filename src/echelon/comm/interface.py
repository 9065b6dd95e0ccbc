"""Interfaces of collective operations, however the members are connected.

A `Collective` is a fixed set of members that make the same calls in the same order. Its
`gradients(parameters)` makes a `GradientSum`, which averages the members' gradients once per update
and returns `Sums`. `echelon.comm.collectives` and `echelon.comm.gradient_sum` implement both, with
the packing functions at the end of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

MOST_VALUES = 64  # of one `Collective.sum`
MOST_IN_ROW = 16  # of one `GradientSum.begin`


class Collective(Protocol):
    """A fixed set of members that make the same calls in the same order."""

    index: int
    count: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all members, in float64 and with the same bits everywhere.

        At most `MOST_VALUES` values, as many on every member.
        """
        ...

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over all members in place: any size, floating point or int64."""
        ...

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite every member's tensors with those of member `source`."""
        ...

    def barrier(self) -> None: ...

    def gradients(self, parameters: Sequence[Tensor]) -> GradientSum: ...

    def close(self) -> None: ...


class GradientSum(Protocol):
    """The mean of all members' gradients, summed in flat buckets, the last parameters first.

    begin → put … put (or put_all) → finish → scale_, norm, clamp_ as needed → release → begin …
    """

    results: list[Tensor]
    """Per parameter, shaped and strided like it: the mean, valid from `finish` to `release`. Read
    only, since other members may share this memory."""
    shared: bool
    """Whether other members read the memory of `results`, too."""
    slots: list[Tensor]
    """Per parameter, where `put` copies to, from `begin` to `finish`. `put` of a gradient that was
    written there in the first place copies nothing."""

    def begin(self, row: Sequence[float]) -> None:
        """Start an update, before its last backward pass.

        `row[0]` is this member's share of the divisor; the other values are summed along and
        returned by `finish`. At most `MOST_IN_ROW` values, as many on every member.
        """
        ...

    def put(self, at: int, gradient: Tensor) -> None:
        """Hand in the final gradient of parameter `at`. Never waits for gradients of others."""
        ...

    def put_all(self, gradients: Sequence[Tensor | None]) -> None:
        """Hand in all gradients at once. None, like a gradient never put, counts as zero."""
        ...

    def finish(self) -> Sums:
        """Wait for all members, then leave (Σ gradient) / (Σ row[0]) in `results`.

        Zeros if Σ row[0] is 0.
        """
        ...

    def release(self) -> None:
        """Say that this member has read the results. The next `begin` says so too, only later."""
        ...

    def scale_(self, factor: float) -> None:
        """Multiply all results. Called by all members, while none of them reads the results."""
        ...

    def norm(self) -> float:
        """Return the 2-norm of all results as one vector, with the same bits everywhere."""
        ...

    def clamp_(self, limit: float) -> None:
        """Clamp all results to [-limit, limit]. Called under the same conditions as `scale_`."""
        ...


@dataclass(slots=True)
class Sums:
    """What `GradientSum.finish` returns: the same on every member."""

    row: list[float]
    """Σ over members of the rows that they gave to `begin`."""
    finite: bool
    """Whether every value of every result is finite."""
    missing: list[int] = field(default_factory=list)
    """Parameters that no member had a gradient for."""


# Packing tensors as bytes into loads of limited size, so that small ones travel together


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor's values as one row: the same memory if it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def put_back(tensor: Tensor, values: Tensor) -> None:
    """Write the values of `flat(tensor)` back, if that was a copy."""
    if not tensor.is_contiguous():
        tensor.detach().copy_(values.view(tensor.shape))


Load = list[tuple[int, Tensor]]
"""Pieces that travel together: (offset in the load, bytes)."""


def loads(flats: Sequence[Tensor], capacity: int) -> Iterator[Load]:
    """Cut the bytes of all tensors, in order, into loads of at most `capacity` bytes."""
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
