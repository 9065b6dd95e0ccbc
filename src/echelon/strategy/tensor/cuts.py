"""Which rows or columns of a matrix are whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.comm.interface import Collective
from echelon.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Cut:
    """One parameter, divided along `dim`; `places[i]` is where the parts of member i belong."""

    name: str
    shape: torch.Size
    dim: int
    places: tuple[Tensor, ...]

    def cut(self, whole: Tensor, index: int, *, what: str) -> Tensor:
        """The part of a whole that belongs to member `index`."""
        if whole.shape != self.shape:
            raise CheckpointError(
                f"{what} is {tuple(whole.shape)}, but the parameter is {tuple(self.shape)}"
            )
        return whole.detach().index_select(self.dim, self.places[index].to(whole.device))


def even(size: int, count: int) -> tuple[Tensor, ...]:
    """Neighbours stay together; parts differ by one at most."""
    edges = [size * at // count for at in range(count + 1)]
    return tuple(torch.arange(*edges[at : at + 2]) for at in range(count))


def by_heads(width: int, heads: int, parts: int, count: int) -> tuple[Tensor, ...]:
    """Rows of `parts` matrices one below the other, each laid out by heads."""
    rows = torch.arange(parts * width).view(parts, heads, width // heads)
    return tuple(rows[:, chosen].flatten() for chosen in even(heads, count))


def gathered(cuts: Sequence[Cut], parts: Sequence[Tensor], team: Collective) -> Iterator[Tensor]:
    """The wholes that `parts` are of, one after the other; called by the whole team."""
    for cut, part in zip(cuts, parts, strict=True):
        whole = part.new_empty(cut.shape)
        for source, places in enumerate(cut.places):
            shape = list(cut.shape)
            shape[cut.dim] = len(places)
            piece = part.contiguous() if source == team.index else part.new_empty(shape)
            team.broadcast_([piece], source)
            whole.index_copy_(cut.dim, places.to(whole.device), piece)
        yield whole
