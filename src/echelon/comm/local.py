"""Members of one host, through memory they have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.comm.board import Board
from echelon.comm.interface import MOST_VALUES, GradientSum
from echelon.comm.kernels import PIECE, Divider
from echelon.comm.layout import pieces, plan, total_bytes
from echelon.comm.packing import flat, loads, pack, put_back, unpack
from echelon.comm.peers import Peer, Watch
from echelon.comm.rendezvous import Rendezvous
from echelon.comm.segment import PAGE, prefault, share
from echelon.comm.sliced import BUCKET, Averaging, SlicedSum
from echelon.comm.small import SMALL, SmallSum
from echelon.comm.wire import Wire
from echelon.core.errors import PeerError

_STAGE = 4 * PIECE


class Local:
    """`members` in order; `index` is this one's place among them."""

    def __init__(
        self, meeting: Rendezvous, key: str, members: Sequence[Peer], index: int, watch: Watch
    ) -> None:
        self.index, self.count = index, len(members)
        self._meeting, self._key, self._members, self._watch = meeting, key, members, watch
        self._sums: list[SmallSum | SlicedSum] = []
        self._made = 0
        self._divider = Divider(torch.device("cpu"))
        self._board, memory = self._new(2 * self.count * _STAGE)
        # Two in turn for each member, as with the rows of a board. Costs nothing until used.
        self._stages = [half.split(_STAGE) for half in memory.split(self.count * _STAGE)]

    def sum(self, values: Sequence[float]) -> list[float]:
        assert len(values) <= MOST_VALUES, f"{len(values)} values at once"
        return self._board.sum(values)

    def sum_(self, tensor: Tensor) -> None:
        values = flat(tensor)
        for piece in pieces(0, values.numel(), _STAGE // values.itemsize):
            self._sum_piece(values[piece])
        put_back(tensor, values)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        flats = [flat(tensor) for tensor in tensors]
        for load in loads(flats, _STAGE):
            self._board.check()
            stage = self._stages[self._board.next][source]
            if self.index == source:
                pack(load, stage)
            self._board.barrier()
            if self.index != source:
                unpack(load, stage)
        for tensor, values in zip(tensors, flats, strict=True):
            put_back(tensor, values)

    def barrier(self) -> None:
        self._board.barrier()

    def gradients(self, parameters: Sequence[Tensor]) -> GradientSum:
        buckets = plan(parameters, BUCKET)
        size = total_bytes(buckets)
        if size > SMALL:
            return self.sliced(self, parameters, self.count)
        board, memory = self._new(2 * self.count * size)
        prefault(memory, memory[:0])
        made = SmallSum(self, board, memory, parameters, buckets)
        self._sums.append(made)
        return made

    def sliced(
        self,
        collective: Averaging,
        parameters: Sequence[Tensor],
        owners: int,
        outer: Wire | None = None,
    ) -> SlicedSum:
        """Gradients of many bytes; the first `owners` members of this host own slices."""
        buckets = plan(parameters, BUCKET)
        size = total_bytes(buckets)
        board, memory = self._new(self.count * size)
        prefault(memory, memory[self.index * size : (self.index + 1) * size])
        made = SlicedSum(collective, board, memory, parameters, buckets, owners, outer)
        self._sums.append(made)
        return made

    def fail(self, error: PeerError) -> None:
        """Something went wrong outside: the others need not wait for this member."""
        self._board.fail(error)

    def agree(self, share: float, board: Board) -> float:
        """Σ of what this host's owners found."""
        return board.sum([share])[0]

    def close(self) -> None:
        for made in self._sums:
            made.close()
        self._board.close()
        self._stages = []

    def _sum_piece(self, values: Tensor) -> None:
        self._board.check()
        size, kind = values.numel() * values.itemsize, values.dtype
        parts = [stage[:size].view(kind) for stage in self._stages[self._board.next]]
        parts[self.index].copy_(values)
        self._board.barrier()
        self._divider.sum_(values, parts)

    def _new(self, size: int) -> tuple[Board, Tensor]:
        """A board of its own, and memory beside it."""
        self._made += 1
        key, head = f"{self._key}/{self._made}", PAGE * self.count
        memory = share(self._meeting, key, self._members, head + size, self._look)
        deadline = self._meeting.deadline
        board = Board(memory[:head], self._members, self.index, self._watch, deadline)
        return board, memory[head:]

    def _look(self, member: int) -> None:
        for peer in self._members:
            if peer.index == member and self._watch.ended(peer):
                raise PeerError(f"{peer} ended; its memory was awaited")
