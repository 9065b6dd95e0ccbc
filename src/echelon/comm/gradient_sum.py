"""The three implementations of `GradientSum`, by where the gradients are added up.

`PrivateSum` sums buckets over a process group. The other two are for members of one host and add up
gradients in shared memory:

`SmallSum`, for few gradients: every member adds up everything, with one meeting per update. Each
member has two buffers and fills them in turn, so that it never waits before it writes: a member
that begins update 9 has met all others at update 8, when they were done with the buffers of 7.

`SlicedSum`, for many gradients: each member adds up its slice of every bucket, where they lie.

    member 0:  [ 0 0 0 | 0 0 0 ]   each member's gradients in a segment of its own
    member 1:  [ 1 1 1 | 1 1 1 ]
                  ↓        ↓
    member 0:  [ Σ Σ Σ | Σ Σ Σ ]   added up in member 0's segment, slice by slice:
                 by 0     by 1     by member 0 and by member 1 at the same time

A bucket is reduced by its owners as soon as all members have filled it, mostly while backward goes
on. The results lie in member 0's segment, so member 0 writes no gradient of the next update before
all members have released these results. They do so after their optimizer step, a forward pass
before member 0 has to write.

Between hosts, members of the same place within their host add up their slices over the network. On
a host with more members than the smallest host, some members own no slice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from echelon.comm.board import FREED, READY, REDUCED, UPDATES, Board
from echelon.comm.buckets import (
    PIECE,
    Bucket,
    Divider,
    Filling,
    carve,
    pieces,
    plan,
    slices,
    square_sum,
    total_bytes,
    views,
)
from echelon.comm.interface import MOST_IN_ROW, Collective, Sums

if TYPE_CHECKING:
    from torch.distributed import Work

    from echelon.comm.process_group import Wire


NETWORK_BUCKET = 25 * 1024 * 1024
"""Bytes of a bucket that travels between hosts, as in DDP: worth its round trip."""
SHARED_BUCKET = 4 * 1024 * 1024
"""Bytes of a bucket in shared memory."""
SMALL = 128 * 1024
"""Bytes of all gradients up to which `SmallSum` is faster than `SlicedSum`."""
_TOTALS = 32  # where in a row of the board the totals begin, behind the row given to `begin`
assert MOST_IN_ROW < _TOTALS


class PrivateSum(Filling):
    """Gradients in this member's own memory, summed bucket by bucket over `wire`, if there is one.

    Half precision is summed in half precision, as in DDP: float32 would double the bytes to send.
    """

    shared = False

    def __init__(
        self, collective: Collective, parameters: Sequence[Tensor], wire: Wire | None = None
    ) -> None:
        super().__init__(len(parameters), plan(parameters, NETWORK_BUCKET))
        self._collective, self._wire = collective, wire
        device = parameters[0].device
        self._divider = Divider(device)
        self._flats = [torch.zeros(b.size, dtype=b.dtype, device=device) for b in self._buckets]
        self.results = self.slots = views(parameters, self._buckets, self._flats)
        self._works: list[Work] = []
        self._sent = 0

    def finish(self) -> Sums:
        absent = self._fill_rest()
        mine = [float(bool(absent)), *self._row]
        rows = [mine] if self._wire is None else self._wire.gather(mine)
        lacking, *row = _column_sums(rows)
        if self._wire is not None:
            for work in self._works:
                self._wire.end(work)
        self._works.clear()
        self._divider.set(row[0])
        for flat in self._flats:
            self._divider.divide_(flat)
        missing = self._missing(self._collective, absent, lacking)
        return Sums(row, self._divider.finite(), missing)

    def scale_(self, factor: float) -> None:
        torch._foreach_mul_(self._flats, factor)

    def clamp_(self, limit: float) -> None:
        for flat in self._flats:
            flat.clamp_(-limit, limit)

    def norm(self) -> float:
        # Each member measures a slice: all members get the same bits, although their processors may
        # differ and round differently.
        count, index = self._collective.count, self._collective.index
        mine = [flat[slices(flat.numel(), flat.itemsize, count)[index]] for flat in self._flats]
        return math.sqrt(self._collective.sum([square_sum(mine)])[0])

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._works = []

    def _check(self) -> None:
        if self._wire is not None:
            self._wire.check()

    def _begun(self) -> None:
        self._sent = 0

    def _filled(self, buckets: int) -> None:
        if self._wire is None:
            return
        for flat in self._flats[self._sent : buckets]:
            self._works.append(self._wire.begin_sum(flat))
        self._sent = buckets


class SmallSum(Filling):
    """Few gradients of members of one host. `memory` is two buffers for each member."""

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
        lacking, *row = _column_sums(board.read(UPDATES + parity, len(self._row) + 1))
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


class SlicedSum(Filling):
    """Many gradients of members of one host, and of several hosts if there is an `outer`.

    `memory` is one segment for each member of the board. The first `owners` members own a slice of
    every bucket; `outer` connects this one to the owners of the same slice on the other hosts.
    """

    shared = True

    def __init__(
        self,
        collective: Averaging,
        board: Board,
        memory: Tensor,
        parameters: Sequence[Tensor],
        buckets: Sequence[Bucket],
        owners: int,
        outer: Wire | None = None,
    ) -> None:
        super().__init__(len(parameters), buckets)
        self._collective, self._board, self._outer = collective, board, outer
        self._divider = Divider(torch.device("cpu"))
        segments = [carve(part, buckets) for part in memory.split(total_bytes(buckets))]
        self.results = views(parameters, buckets, segments[0])
        self.slots = views(parameters, buckets, segments[board.index])
        self._owned = [self._slice(flats, owners) for flats in zip(*segments, strict=True)]
        self._pieces = [_pieces(parts) for parts in self._owned]
        self._works: list[Work] = []
        if outer is not None:
            outer.failed = board.fail
        self._reduced = self._base = 0
        self._shelf = UPDATES
        self._across = owners < board.count or outer is not None

    def finish(self) -> Sums:
        board = self._board
        absent = self._fill_rest()
        while self._reduced < len(self._buckets):
            goal = self._base + self._reduced + 1
            board.wait(READY, goal, "its gradients of update {} were awaited", self._update)
            self._reduce()
        self._settle()
        board.post(REDUCED, self._update)
        board.wait(
            REDUCED, self._update, "its part of the sum of update {} was awaited", self._update
        )
        # Member 0's totals count: a member that owns no slice has only those of its own host.
        # `finite` covers each member's own slices.
        found = board.read(self._shelf, len(self._row) + 2, _TOTALS)
        lacking, *row = found[0][1:]
        finite = all(line[0] for line in found)
        return Sums(row, finite, self._missing(self._collective, absent, lacking))

    def release(self) -> None:
        self._board.post(FREED, self._update)

    def scale_(self, factor: float) -> None:
        torch._foreach_mul_([parts[0] for parts in self._owned], factor)
        self._board.barrier()

    def clamp_(self, limit: float) -> None:
        for parts in self._owned:
            parts[0].clamp_(-limit, limit)
        self._board.barrier()

    def norm(self) -> float:
        squares = square_sum([parts[0] for parts in self._owned])
        return math.sqrt(self._collective.agree(squares, self._board))

    def close(self) -> None:
        self._board.close()
        if self._outer is not None:
            self._outer.close()
        self._owned, self._pieces, self._works = [], [], []
        self.results, self.slots = [], []

    def _slice(self, flats: Sequence[Tensor], owners: int) -> list[Tensor]:
        """Return this member's slice of one bucket, in every segment; empty if it owns none."""
        if self._board.index >= owners:
            return [flat[:0] for flat in flats]
        mine = slices(flats[0].numel(), flats[0].itemsize, owners)[self._board.index]
        return [flat[mine] for flat in flats]

    def _check(self) -> None:
        self._board.check()

    def _begun(self) -> None:
        self._base = (self._update - 1) * len(self._buckets)
        self._reduced = 0
        self._shelf = UPDATES + (self._update & 1)
        self._board.write(self._shelf, [0.0, *self._row])
        self._board.post(FREED, self._update - 1)

    def _enter(self) -> None:
        self._entered = True
        if self._board.index == 0:
            what = "it was awaited to be done with update {}"
            self._board.wait(FREED, self._update - 1, what, self._update - 1)

    def _absent(self, absent: Sequence[int]) -> None:
        if absent:
            self._board.write(self._shelf, [1.0])

    def _filled(self, buckets: int) -> None:
        self._board.post(READY, self._base + buckets)
        self._reduce()

    def _reduce(self) -> None:
        """Reduce the buckets that all members have filled by now."""
        ready = min(self._board.least(READY) - self._base, len(self._buckets))
        if self._reduced == 0 and ready > 0 and not self._across:
            self._divider.set(sum(row[1] for row in self._board.read(self._shelf, 2)))
        while self._reduced < ready:
            self._reduce_bucket(self._reduced)
            self._reduced += 1

    def _reduce_bucket(self, number: int) -> None:
        if not self._across:
            for total, parts in self._pieces[number]:
                self._divider.mean_(total, parts)
            return
        for total, parts in self._pieces[number]:
            self._divider.sum_(total, parts)
        if self._outer is not None:
            self._works.append(self._outer.begin_sum(self._owned[number][0]))

    def _settle(self) -> None:
        """Finish this member's slices, once they are summed on this host, and write the totals."""
        rows = self._board.read(self._shelf, len(self._row) + 1)
        if self._outer is not None:
            rows = self._outer.gather(_column_sums(rows))
            for work in self._works:
                self._outer.end(work)
            self._works.clear()
        totals = _column_sums(rows)
        if self._outer is not None:
            self._divider.set(totals[1])
            for found in self._pieces:
                for total, _ in found:
                    self._divider.divide_(total)
        self._board.write(self._shelf, [float(self._divider.finite()), *totals], _TOTALS)


class Averaging(Collective, Protocol):
    """A collective that makes sliced sums."""

    def agree(self, share: float, board: Board) -> float:
        """Return Σ over the owners of their shares, with the same bits on every member."""
        ...


def _pieces(parts: Sequence[Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    step = PIECE // parts[0].itemsize
    cut = [[part[piece] for part in parts] for piece in pieces(0, parts[0].numel(), step)]
    return [(held[0], held) for held in cut]


def _column_sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]
