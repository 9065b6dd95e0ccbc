"""Windows over one long sequence of tokens, for language models."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.core.errors import DataError
from echelon.core.types import Batch


class WindowSource:
    """Sample i is the window of `length` tokens from i·stride on; `y` is `x` shifted by one.

    The windows are never stored: a gather copies out of a strided view of the sequence, once for
    x and once for y. That is 3 to 4 times as fast as indexing with a table of positions, and
    leaves both contiguous.
    """

    chunkable = True

    def __init__(self, tokens: Tensor, length: int, stride: int = 1) -> None:
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise DataError(
                f"tokens must be a vector of whole numbers, not {tokens.dtype} {list(tokens.shape)}"
            )
        if length < 1 or stride < 1:
            raise DataError(f"windows of {length} tokens every {stride}: both must be at least 1")
        if len(tokens) <= length:
            raise DataError(
                f"{len(tokens)} tokens are too few for one window of {length} and its next token"
            )
        tokens = tokens.contiguous()
        self._x = tokens[:-1].unfold(0, length, stride)
        self._y = tokens[1:].unfold(0, length, stride)

    def __len__(self) -> int:
        return len(self._x)

    def gather(self, rows: Tensor) -> Batch:
        rows = rows.to(self._x.device)
        return {
            "x": self._x.index_select(0, rows).to(torch.int64),
            "y": self._y.index_select(0, rows).to(torch.int64),
        }
