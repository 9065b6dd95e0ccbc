"""Which part of every parameter is whose.

A parameter's values, in the order they lie in memory, are cut into ranges, one for each member of
a sharded group; some may be empty. What an optimizer keeps for a parameter is cut alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.comm.interface import Collective
from echelon.core.errors import CheckpointError

GATHERED = 32 << 20
"""Bytes that are made whole at once: members that do not keep them need no more room than that."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter's part that lies here, and what is needed to find the others."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    """Of each member of the group."""
    local: Tensor
    """The part itself: what the optimizer steps."""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def empty(self, like: Tensor) -> Tensor:
        """Room for the whole."""
        return torch.empty_strided(self.shape, self.stride, dtype=like.dtype, device=like.device)

    def cut(self, whole: Tensor, index: int, *, what: str) -> Tensor:
        """The part of a whole that belongs to member `index`, shaped like what is held here."""
        if whole.shape != self.shape:
            raise CheckpointError(
                f"{what} is {tuple(whole.shape)}, but the parameter is {tuple(self.shape)}"
            )
        if whole.stride() != self.stride:
            whole = self.empty(whole).copy_(whole)
        start, stop = self.ranges[index]
        return in_row(whole)[start:stop].view(self.local.shape)


def in_row(tensor: Tensor) -> Tensor:
    """Its values in the order they lie in memory; a parameter has no gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def gathered(
    pieces: Sequence[Piece], parts: Sequence[Tensor], group: Collective
) -> Iterator[Tensor]:
    """The wholes that `parts` are of, one after the other; called by all members of the group."""
    for chosen in _loads(pieces, parts):
        wholes = [pieces[at].empty(parts[at]) for at in chosen]
        rows = [in_row(whole) for whole in wholes]
        for at, row in zip(chosen, rows, strict=True):
            start, stop = pieces[at].ranges[group.index]
            row[start:stop].copy_(parts[at].reshape(-1))
        for source in range(group.count):
            ranges = [pieces[at].ranges[source] for at in chosen]
            group.broadcast_(
                [row[a:b] for row, (a, b) in zip(rows, ranges, strict=True) if a < b], source
            )
        yield from wholes


def _loads(pieces: Sequence[Piece], parts: Sequence[Tensor]) -> Iterator[list[int]]:
    chosen: list[int] = []
    used = 0
    for at, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        size = piece.numel * part.itemsize
        if chosen and used + size > GATHERED:
            yield chosen
            chosen, used = [], 0
        chosen.append(at)
        used += size
    if chosen:
        yield chosen
