"""As many passes in every member: one that has no samples goes along with some that do not count.

A batch without a single sample would not do: many a model and loss cannot take it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.comm.interface import Collective
from echelon.core.types import Batch, Column, Sparse
from echelon.data import batch as columns

_ROOM = 1 << 14


class Pad(dict[str, Column]):
    """A batch that keeps step with the others' and counts for nothing."""


class Padding:
    """Knows what samples look like, and how many passes there are."""

    def __init__(self, everybody: Collective, device: torch.device) -> None:
        self._everybody, self._device = everybody, device
        self._known: Pad | None = None

    def pads(self, micro: Sequence[Batch], passes: int) -> list[Pad]:
        """To go through after `micro`; the first time, all members call this together."""
        if self._known is None:
            self._known = self._told(_twice(micro[0]) if micro else None)
        missing = passes - len(micro)
        if missing <= 0:
            return []
        return [_twice(micro[0]) if micro else self._known] * missing

    def most(self, passes: int) -> int:
        """Of all members' numbers; called by all together."""
        board = torch.zeros(self._everybody.count, dtype=torch.int64)
        board[self._everybody.index] = passes
        self._everybody.sum_(board)
        return int(board.max())

    def _told(self, mine: Pad | None) -> Pad:
        """A sample of the first member that has one, for those that have none."""
        board = torch.zeros(self._everybody.count, _ROOM, dtype=torch.int64)
        if mine is not None:
            said = json.dumps(_described(mine)).encode()
            assert len(said) <= _ROOM, f"{len(said)} bytes to describe a batch"
            board[self._everybody.index, : len(said)] = torch.tensor(list(said))
        self._everybody.sum_(board)
        source, told = next((at, row) for at, row in enumerate(board.tolist()) if row[0])
        known = mine if source == self._everybody.index else None
        known = known or _made(json.loads(bytes(value for value in told if value)), self._device)
        self._everybody.broadcast_(
            [part for c in known.values() for part in columns.tensors(c)], source
        )
        return known


def _twice(batch: Batch) -> Pad:
    """Its first sample two times: of one alone, batch norm could not tell the variance."""
    first = torch.zeros(2, dtype=torch.int64)
    return Pad({name: columns.take(column, first) for name, column in batch.items()})


def _described(batch: Batch) -> dict[str, Any]:
    return {
        name: [column.width if isinstance(column, Sparse) else None, _shapes(column)]
        for name, column in batch.items()
    }


def _shapes(column: Column) -> list[tuple[str, list[int]]]:
    parts = columns.tensors(column)
    return [(str(part.dtype).removeprefix("torch."), list(part.shape)) for part in parts]


def _made(described: dict[str, Any], device: torch.device) -> Pad:
    made = Pad()
    for name, (width, shapes) in described.items():
        parts = [_room(kind, shape, device) for kind, shape in shapes]
        made[name] = parts[0] if width is None else Sparse(parts[0], parts[1], parts[2], width)
    return made


def _room(kind: str, shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.zeros(*shape, dtype=getattr(torch, kind), device=device)
