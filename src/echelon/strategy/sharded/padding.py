"""As many forward passes in every member: one that has no samples goes through with none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from echelon.comm.interface import Collective
from echelon.core.types import Batch, Sparse
from echelon.data.batch import emptied

_ROOM = 1 << 14


class Padding:
    """Knows what a batch without samples looks like, and how many passes there are."""

    def __init__(self, everybody: Collective) -> None:
        self._everybody = everybody
        self.empty: Batch | None = None

    def empties(self, micro: Sequence[Batch], passes: int) -> list[Batch]:
        """Batches to go through after `micro`; the first time, all members call this together."""
        if self.empty is None:
            self.empty = self._learn(micro[0] if micro else None)
        return [self.empty] * (passes - len(micro))

    def most(self, passes: int) -> int:
        """Of all members' numbers; called by all together."""
        board = torch.zeros(self._everybody.count, dtype=torch.int64)
        board[self._everybody.index] = passes
        self._everybody.sum_(board)
        return int(board.max())

    def _learn(self, batch: Batch | None) -> Batch:
        """From one's own batch; without one, from another member's, and so all describe theirs."""
        board = torch.zeros(self._everybody.count, _ROOM, dtype=torch.int64)
        if batch is not None:
            said = json.dumps(_described(batch)).encode()
            assert len(said) <= _ROOM, f"{len(said)} bytes to describe a batch"
            board[self._everybody.index, : len(said)] = torch.tensor(list(said))
        self._everybody.sum_(board)
        if batch is not None:
            return emptied(batch)
        told = next(row for row in board.tolist() if row[0])
        return _made(json.loads(bytes(value for value in told if value)))


def _described(batch: Batch) -> dict[str, Any]:
    return {
        name: [_kind(column.values.dtype), column.width]
        if isinstance(column, Sparse)
        else [_kind(column.dtype), list(column.shape[1:])]
        for name, column in batch.items()
    }


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _made(described: dict[str, Any]) -> Batch:
    made: Batch = {}
    for name, (kind, shape) in described.items():
        dtype = getattr(torch, kind)
        if isinstance(shape, int):
            none = torch.zeros(0, dtype=torch.int64)
            offsets = torch.zeros(1, dtype=torch.int64)
            made[name] = Sparse(none, torch.zeros(0, dtype=dtype), offsets, shape)
        else:
            made[name] = torch.zeros(0, *shape, dtype=dtype)
    return made
