"""One explanation for all members."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

_BYTES = 600


class Summing(Protocol):
    """The part of a collective that is needed here."""

    index: int
    count: int

    def sum_(self, tensor: Tensor) -> None: ...


def agree(collective: Summing, text: str, blame: int) -> str:
    """The words of the member that is most to blame; of the first, if several are."""
    board = torch.zeros(collective.count, _BYTES + 1, dtype=torch.int64)
    said = torch.tensor(list(text.encode()[:_BYTES]), dtype=torch.int64)
    board[collective.index, 0] = blame
    board[collective.index, 1 : 1 + len(said)] = said
    collective.sum_(board)
    chosen = int(board[:, 0].argmax())
    letters = bytes(value for value in board[chosen, 1:].tolist() if value)
    words = letters.decode(errors="ignore")
    return words if collective.count == 1 else f"{words} (member {chosen})"
