"""Collective, GradientSum, packing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

# --- interface ---
# What members of a collective can do together, however they are connected.

MOST_VALUES = 64
MOST_IN_ROW = 16


@dataclass(slots=True)
class Sums:
    """What the members agree on after an update's gradients met."""

    row: list[float]
    """Σ over members of what they gave to `begin`."""
    finite: bool
    """Whether every value of every result is."""
    missing: list[int] = field(default_factory=list)
    """Parameters that no member had a gradient for."""


class GradientSum(Protocol):
    """Where the members' gradients meet: flat buckets, the last parameters first.

    begin → put … put (or put_all) → finish → scale_, norm, clamp_ as needed → release → begin …
    """

    results: list[Tensor]
    """Per parameter, shaped and strided like it; the mean is found here after `finish`, and is
    good until `release`. May be shared with other members: read only."""
    shared: bool
    """Whether `results` is memory others read too."""
    slots: list[Tensor]
    """Per parameter, where `put` copies to, from `begin` to `finish`. A gradient that was written
    there in the first place is put without a copy."""

    def begin(self, row: Sequence[float]) -> None:
        """Before the update's last backward. `row[0]` is this member's share of the divisor; the
        rest is summed for whoever asks. At most 16 values, as many on every member."""
        ...

    def put(self, at: int, gradient: Tensor) -> None:
        """The gradient of parameter `at` is final. Never waits for gradients of others."""
        ...

    def put_all(self, gradients: Sequence[Tensor | None]) -> None:
        """All at once. None, as not being put at all, counts as zero."""
        ...

    def finish(self) -> Sums:
        """Wait for all. (Σ gradient) / (Σ row[0]) is then in `results`; zeros if Σ row[0] is 0."""
        ...

    def release(self) -> None:
        """This member has read the results. The next `begin` says so too, later than need be."""
        ...

    def scale_(self, factor: float) -> None:
        """Multiply all results. Nobody may be reading them; called by all members."""
        ...

    def norm(self) -> float:
        """The 2-norm of all results as one vector, the same bits everywhere."""
        ...

    def clamp_(self, limit: float) -> None:
        """Bring every value into [-limit, limit]; as `scale_`."""
        ...


class Collective(Protocol):
    """Members that call the same things in the same order."""

    index: int
    count: int

    def sum(self, values: Sequence[float]) -> list[float]:
        """At most 64 values, summed in float64; the same bits everywhere."""
        ...

    def sum_(self, tensor: Tensor) -> None:
        """Any size, floating or int64, in place."""
        ...

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """What the member `source` holds, everywhere."""
        ...

    def barrier(self) -> None: ...

    def gradients(self, parameters: Sequence[Tensor]) -> GradientSum: ...

    def close(self) -> None: ...


# --- packing ---
# Tensors as bytes, packed into loads of limited size.

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
