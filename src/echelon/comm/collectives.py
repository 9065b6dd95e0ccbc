"""The four implementations of `Collective`, by how the members reach each other.

    Solo       one member
    Local      members of one host, through shared memory
    Remote     members on several hosts or GPUs, through a torch process group
    TwoLevel   several members on each of several hosts: shared memory inside, torch between hosts

`Group.collective` chooses one. Each makes the sums of gradients (`gradient_sum`) that fit it:
`PrivateSum` for Solo and Remote, `SmallSum` or `SlicedSum` for Local, `SlicedSum` for TwoLevel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.comm.board import Board
from echelon.comm.buckets import PIECE, Divider, pieces, plan, total_bytes
from echelon.comm.gradient_sum import (
    SHARED_BUCKET,
    SMALL,
    Averaging,
    PrivateSum,
    SlicedSum,
    SmallSum,
)
from echelon.comm.interface import MOST_VALUES, GradientSum, flat, loads, pack, put_back, unpack
from echelon.comm.peers import Peer, Rendezvous, Watch
from echelon.comm.process_group import Wire
from echelon.comm.shared_memory import PAGE, prefault, share
from echelon.core.errors import PeerError

_STAGE = 4 * PIECE  # bytes that a member of a host shows the others at a time
_LOAD = 25 * 1024 * 1024  # bytes of tensors that are broadcast over the network at a time


class Solo:
    """The collective of one member."""

    index = 0
    count = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def sum_(self, tensor: Tensor) -> None:
        """Do nothing: the sum over one member is its own tensor."""

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Do nothing: this member has the tensors already."""

    def barrier(self) -> None:
        """Do nothing: there is no other member to wait for."""

    def gradients(self, parameters: Sequence[Tensor]) -> GradientSum:
        return PrivateSum(self, parameters)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Local:
    """Members of one host, through shared memory: `index` is this one's place in `members`.

    A `Board` carries small rows of numbers, and counters that say how far each member has come.
    Tensors go through stages, pieces of memory that each member fills for the others to read.
    """

    def __init__(
        self, meeting: Rendezvous, key: str, members: Sequence[Peer], index: int, watch: Watch
    ) -> None:
        self.index, self.count = index, len(members)
        self._meeting, self._key, self._members, self._watch = meeting, key, members, watch
        self._sums: list[SmallSum | SlicedSum] = []
        self._made = 0
        self._divider = Divider(torch.device("cpu"))
        self._board, memory = self._new(2 * self.count * _STAGE)
        # Each member has two stages and uses them in turn, as with the rows of a board. The kernel
        # gives no memory to them until they are used.
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
        buckets = plan(parameters, SHARED_BUCKET)
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
        """Make the sum for gradients of many bytes.

        The first `owners` members of this host own slices. `outer` connects this member to the
        owners of the same slice on other hosts.
        """
        buckets = plan(parameters, SHARED_BUCKET)
        size = total_bytes(buckets)
        board, memory = self._new(self.count * size)
        prefault(memory, memory[self.index * size : (self.index + 1) * size])
        made = SlicedSum(collective, board, memory, parameters, buckets, owners, outer)
        self._sums.append(made)
        return made

    def fail(self, error: PeerError) -> None:
        """Break off all waits for this member on its host: `error` happened elsewhere."""
        self._board.fail(error)

    def agree(self, share: float, board: Board) -> float:
        """Sum the owners' shares over this host."""
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
        """Share `size` bytes between the members, and a board of their own beside them."""
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


class Remote:
    """Members that only a torch process group connects: on several hosts, or on several GPUs.

    `connect(name)` makes another process group of the same members. Every gradient sum needs its
    own, because its sums begin whenever a bucket is full, and torch matches the operations of a
    group by the order in which they begin.
    """

    def __init__(self, connect: Callable[[str], Wire]) -> None:
        self._connect = connect
        self._wire = connect("main")
        self.index, self.count = self._wire.index, self._wire.count
        self._sums: list[PrivateSum] = []

    def sum(self, values: Sequence[float]) -> list[float]:
        assert len(values) <= MOST_VALUES, f"{len(values)} values at once"
        return [sum(column) for column in zip(*self._wire.gather(values), strict=True)]

    def sum_(self, tensor: Tensor) -> None:
        values = flat(tensor)
        sent = values.to(self._wire.device)  # NCCL takes tensors of its own device only
        self._wire.end(self._wire.begin_sum(sent))
        if sent is not values:
            values.copy_(sent)
        put_back(tensor, values)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        broadcast_over(self._wire, tensors, source)

    def barrier(self) -> None:
        self._wire.gather([0.0])

    def gradients(self, parameters: Sequence[Tensor]) -> GradientSum:
        made = PrivateSum(self, parameters, self._connect(f"gradients{len(self._sums)}"))
        self._sums.append(made)
        return made

    def close(self) -> None:
        for made in self._sums:
            made.close()
        self._wire.close()


class TwoLevel:
    """Members of several hosts: shared memory inside each host, torch between them.

    `hosts` lists the members of each host, by place in the collective. Lane k connects the k-th
    members of all hosts; there are as many lanes as the smallest host has members, and
    `connect(name, members of the lane)` makes the process group of one. All lanes carry slices of
    gradients. Everything else goes through lane 0, whose members are the leaders of their hosts.

        host 0:   member 0 ═ member 1 ═ member 2       ═  shared memory
                     │          │
                   lane 0     lane 1
                     │          │
        host 1:   member 3 ═ member 4
    """

    def __init__(
        self,
        index: int,
        hosts: Sequence[Sequence[int]],
        inner: Local,
        connect: Callable[[str, Sequence[int]], Wire],
    ) -> None:
        self.index, self.count = index, sum(map(len, hosts))
        self._hosts, self._inner, self._connect = hosts, inner, connect
        self._host = next(i for i, members in enumerate(hosts) if index in members)
        self._lanes = min(map(len, hosts))
        self._sums = 0
        self._leaders = self._lane("leaders") if inner.index == 0 else None
        if self._leaders is not None:
            self._leaders.failed = inner.fail

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum inside each host, then between the leaders, then hand the result out inside.

        The last step is a sum, too, to which only the leader adds anything but zeros: 0 + x is x,
        so all members get the leader's bits.
        """
        assert len(values) <= MOST_VALUES, f"{len(values)} values at once"
        found = self._inner.sum(values)
        if self._leaders is None:
            return self._inner.sum([0.0] * len(values))
        rows = self._leaders.gather(found)
        return self._inner.sum([sum(column) for column in zip(*rows, strict=True)])

    def sum_(self, tensor: Tensor) -> None:
        values = flat(tensor)
        self._inner.sum_(values)
        if self._leaders is not None:
            self._leaders.end(self._leaders.begin_sum(values))
        self._inner.broadcast_([values])
        put_back(tensor, values)

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        home = next(i for i, members in enumerate(self._hosts) if source in members)
        if self._host == home:
            self._inner.broadcast_(tensors, self._hosts[home].index(source))
        if self._leaders is not None:
            broadcast_over(self._leaders, tensors, home)
        if self._host != home:
            self._inner.broadcast_(tensors)

    def barrier(self) -> None:
        self.sum([0.0])

    def gradients(self, parameters: Sequence[Tensor]) -> GradientSum:
        self._sums += 1
        owns = self._inner.index < self._lanes
        outer = self._lane(f"gradients{self._sums}") if owns else None
        try:
            return self._inner.sliced(self, parameters, self._lanes, outer)
        except BaseException:
            if outer is not None:
                outer.close()
            raise

    def agree(self, share: float, board: Board) -> float:  # noqa: ARG002
        """Take host 0's sum of shares for all: all hosts have the same results to measure."""
        return self.sum([share if self._host == 0 else 0.0])[0]

    def close(self) -> None:
        self._inner.close()
        if self._leaders is not None:
            self._leaders.close()

    def _lane(self, name: str) -> Wire:
        at = self._inner.index
        return self._connect(f"{name}/{at}", [members[at] for members in self._hosts])


def broadcast_over(wire: Wire, tensors: Sequence[Tensor], source: int) -> None:
    """Broadcast tensors from member `source`, many small ones packed into one message."""
    flats = [flat(tensor) for tensor in tensors]
    for load in loads(flats, _LOAD):
        last, piece = load[-1]
        packed = torch.empty(last + piece.numel(), dtype=torch.uint8, device=wire.device)
        if wire.index == source:
            pack(load, packed)
        wire.broadcast_(packed, source)
        if wire.index != source:
            unpack(load, packed)
    for tensor, values in zip(tensors, flats, strict=True):
        put_back(tensor, values)
