"""A torch process group between some members, whose failures name what is known."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from echelon.comm.bounded import aside, bounded
from echelon.comm.peers import Peer, Watch
from echelon.comm.rendezvous import GRACE, Rendezvous
from echelon.core.errors import PeerError

_LINGER = 0.1  # seconds
_MOMENT = timedelta(seconds=0.2)


class Wire:
    """gloo on CPU, NCCL on CUDA. Not torch's default group: any number of them, closed alone."""

    def __init__(
        self,
        meeting: Rendezvous,
        key: str,
        members: Sequence[Peer],
        index: int,
        device: torch.device,
        watch: Watch,
    ) -> None:
        self.members, self.index, self.count, self.device = members, index, len(members), device
        self._watch, self._deadline = watch, meeting.deadline
        self._error: PeerError | None = None
        self.failed: Callable[[PeerError], None] | None = None
        """Told when the group is broken, for those who wait for this member elsewhere."""
        self._begun = 0
        meeting.gather(f"{key}/wire", [member.index for member in members], "", self._look)
        make = _nccl if device.type == "cuda" else _gloo
        store = PrefixStore(key, meeting.store)
        self._group: Any = self._try(lambda: make(meeting, store, index, len(members)))

    def begin_sum(self, tensor: Tensor) -> dist.Work:
        """Adds up in place; not there before `end`."""
        self.check()
        return self._begin(lambda: self._group.allreduce([tensor]))

    def end(self, work: dist.Work) -> None:
        self._try(lambda: self._await(work))
        self._begun -= 1

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of all members, in their order."""
        self.check()
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(mine) for _ in range(self.count)]
        self.end(self._begin(lambda: self._group.allgather([found], [mine])))
        return [row.tolist() for row in found]

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        self.check()
        options = dist.BroadcastOptions()
        options.rootRank = source
        self.end(self._begin(lambda: self._group.broadcast([tensor], options)))

    def close(self) -> None:
        group, self._group = self._group, None
        if self._error is None:
            self._error = PeerError("this member has left its collective")
        if group is None:
            return
        if not self._begun:
            group.shutdown()
            return
        # torch frees a group only once all that was begun there has ended, or its time is up.
        # This member has left: it does not wait for that, and its end will close the connections.
        held = [group]
        del group
        aside(held.clear).join(_LINGER)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _begin(self, call: Callable[[], Any]) -> dist.Work:
        work: dist.Work = self._try(call)
        self._begun += 1
        return work

    def _await(self, work: dist.Work) -> None:
        """torch cannot be interrupted while it waits, so it waits for a moment at a time."""
        if self.device.type != "cpu":  # there it is the GPU that waits
            work.wait()
            return
        deadline = time.monotonic() + self._deadline
        while True:
            try:
                work.wait(_MOMENT)
                return
            except RuntimeError:
                if work.is_completed() or time.monotonic() > deadline:
                    raise
            if self._watch.halt.why is not None:
                raise RuntimeError(self._watch.halt.why)

    def _look(self, member: int) -> None:
        for peer in self.members:
            if peer.index == member and self._watch.ended(peer):
                raise PeerError(f"{peer} ended before all were connected")

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (RuntimeError, TimeoutError) as error:
            self._error = PeerError(self._reason(str(error).partition("\n")[0]))
            if self.failed is not None:
                self.failed(self._error)
            raise self._error from None

    def _reason(self, line: str) -> str:
        """gloo says that someone is gone, not who: for this host, we can tell."""
        ended = [str(peer) for peer in self._watch.settle(self.members)]
        if ended:
            return f"{', '.join(ended)} ended; the sum with the others was awaited"
        others = [str(peer) for i, peer in enumerate(self.members) if i != self.index]
        who = others[0] if len(others) == 1 else f"one of {', '.join(others)}"
        return f"{who} is gone or did not come within {self._deadline:g} s ({_gist(line)})"


def _gist(line: str) -> str:
    """Without the place in gloo's source and its advice."""
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". ")[0]


def _gloo(meeting: Rendezvous, store: Store, index: int, count: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    create = dist.ProcessGroupGloo.create_device
    asked_for = [create(interface=name) for name in meeting.interfaces]
    options._devices = asked_for or [create(hostname=meeting.address)]
    options._timeout = timedelta(seconds=meeting.deadline)
    return bounded(
        lambda: dist.ProcessGroupGloo(store, index, count, options), meeting.deadline + GRACE
    )


def _nccl(meeting: Rendezvous, store: Store, index: int, count: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=meeting.deadline)
    return dist.ProcessGroupNCCL(store, index, count, options)
