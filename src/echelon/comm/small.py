"""Few gradients: everybody adds up everything, with one meeting per update.

Each member has two buffers and fills them in turn, so that nobody has to wait before writing:
whoever begins update 9 has met all others at update 8, when they were done with those of 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.comm.board import READY, UPDATES, Board
from echelon.comm.filling import Filling
from echelon.comm.interface import Collective, Sums
from echelon.comm.kernels import Divider, square_sum
from echelon.comm.layout import Bucket, carve, total_bytes, views

SMALL = 128 * 1024
"""Bytes of all gradients up to which this is the faster way."""


class SmallSum(Filling):
    """`memory`: two buffers for each member of the board."""

    shared = False

    def __init__(
        self,
        collective: Collective,
        board: Board,
        memory: Tensor,
        parameters: Sequence[Tensor],
        buckets: Sequence[Bucket],
    ) -> None:
        super().__init__(len(parameters), buckets)
        self._collective, self._board = collective, board
        self._divider = Divider(torch.device("cpu"))
        self._totals = [torch.zeros(bucket.size, dtype=bucket.dtype) for bucket in buckets]
        self.results = views(parameters, buckets, self._totals)
        size = total_bytes(buckets)
        buffers = [carve(part, buckets) for part in memory.split(size)]
        self._parts, self._places = [], []
        for parity in range(2):
            held = buffers[parity * board.count : (parity + 1) * board.count]
            self._parts.append(list(zip(*held, strict=True)))
            self._places.append(views(parameters, buckets, held[board.index]))
        self.slots = self._places[0]

    def finish(self) -> Sums:
        board, parity = self._board, self._update & 1
        absent = self._fill_rest()
        board.write(UPDATES + parity, [float(bool(absent)), *self._row])
        board.post(READY, self._update)
        board.wait(READY, self._update, "its gradients of update {} were awaited", self._update)
        rows = board.read(UPDATES + parity, len(self._row) + 1)
        lacking, *row = [sum(column) for column in zip(*rows, strict=True)]
        self._divider.set(row[0])
        for total, parts in zip(self._totals, self._parts[parity], strict=True):
            self._divider.mean_(total, parts)
        missing = self._missing(self._collective, absent, lacking)
        return Sums(row, self._divider.finite(), missing)

    def scale_(self, factor: float) -> None:
        torch._foreach_mul_(self._totals, factor)

    def clamp_(self, limit: float) -> None:
        for total in self._totals:
            total.clamp_(-limit, limit)

    def norm(self) -> float:
        return math.sqrt(square_sum(self._totals))

    def close(self) -> None:
        self._board.close()
        self._parts, self._places, self.slots = [], [], []

    def _check(self) -> None:
        self._board.check()

    def _begun(self) -> None:
        self.slots = self._places[self._update & 1]
