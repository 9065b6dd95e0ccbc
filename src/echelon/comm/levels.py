"""Members of several hosts: shared memory inside each, torch between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from echelon.comm.board import Board
from echelon.comm.interface import MOST_VALUES, GradientSum
from echelon.comm.local import Local
from echelon.comm.packing import flat, put_back
from echelon.comm.remote import broadcast_over
from echelon.comm.wire import Wire


class TwoLevel:
    """`hosts`: which members are on which host, by place in the collective.

    Lane k connects the k-th members of all hosts; there are as many lanes as the smallest host
    has members. `connect(name, lane members)` makes one. The first lane's members, the leaders,
    also do what is small.
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
        """Inside, between the leaders, and back: 0 + x is x, so all get the leader's bits."""
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
        """All hosts have the same results; the first one's measure is taken for all."""
        return self.sum([share if self._host == 0 else 0.0])[0]

    def close(self) -> None:
        self._inner.close()
        if self._leaders is not None:
            self._leaders.close()

    def _lane(self, name: str) -> Wire:
        at = self._inner.index
        return self._connect(f"{name}/{at}", [members[at] for members in self._hosts])
