"""Torch process groups whose failures name the member that caused them.

`Wire` is one process group of some members, with a deadline for every wait. `TorchWorld` is
torch.distributed's global group of all members, for engines that are built on a `DeviceMesh`.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.comm.peers import GRACE, Peer, Rendezvous, Watch, aside, bounded, interface_of
from echelon.core.errors import PeerError, UserError

_LINGER = 0.1  # seconds that closing a group waits for operations that have begun
_MOMENT = timedelta(seconds=0.2)  # of one wait inside torch, between two looks whether to go on
# The variable that torch's own gloo reads for where to listen; there is no option. Without it, gloo
# listens where the host's name points to, which may be open to everyone, or to no other member.
_INTERFACE = "GLOO_SOCKET_IFNAME"


class Wire:
    """A process group of some members: gloo on CPU, NCCL on CUDA.

    It is not torch's default group, so there may be any number, and each is closed on its own.
    """

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
        """Called with the error when the group breaks, to end waits for this member elsewhere."""
        self._begun = 0
        meeting.gather(f"{key}/wire", [member.index for member in members], "", self._look)
        make = _nccl if device.type == "cuda" else _gloo
        store = PrefixStore(key, meeting.store)
        self._group: Any = self._try(lambda: make(meeting, store, index, len(members)))

    def begin_sum(self, tensor: Tensor) -> dist.Work:
        """Begin to sum a tensor in place; the result is there once `end` returns."""
        self.check()
        return self._begin(lambda: self._group.allreduce([tensor]))

    def end(self, work: dist.Work) -> None:
        self._try(lambda: self._await(work))
        self._begun -= 1

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all members, in the order of members."""
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
        # torch frees a group only once all operations begun there have ended or timed out. This
        # member is leaving and does not wait: the end of its process will close the connections.
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
        """Wait in short steps, because torch cannot be interrupted while it waits."""
        if self.device.type != "cpu":  # the wait only queues on the GPU and returns at once
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
        """Name who is gone, which gloo does not: processes of this host are watched."""
        ended = [str(peer) for peer in self._watch.settle(self.members)]
        if ended:
            return f"{', '.join(ended)} ended; the sum with the others was awaited"
        others = [str(peer) for i, peer in enumerate(self.members) if i != self.index]
        who = others[0] if len(others) == 1 else f"one of {', '.join(others)}"
        return f"{who} is gone or did not come within {self._deadline:g} s ({_gist(line)})"


def _gist(line: str) -> str:
    """Return gloo's message without the place in its source and without its advice."""
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


class TorchWorld:
    """torch.distributed's global group of all members, on the store where they met."""

    def __init__(self, meeting: Rendezvous, index: int, count: int, device: torch.device) -> None:
        if dist.is_initialized():
            raise UserError(
                "this process is a member of a torch.distributed group of its own; "
                "call torch.distributed.destroy_process_group() before"
            )
        self._device = device.type
        self._meeting = meeting
        self._sockets: set[tuple[str, str]] = set()
        self._asked_for = ",".join(meeting.interfaces)
        # Meet here first: a member that does not come is noticed here, where waits can be
        # interrupted, and not inside torch.
        meeting.gather("world", range(count), "")
        if where := self._asked_for or interface_of(meeting.address):
            os.putenv(_INTERFACE, where)
        try:
            with self._noting():
                self._meet(meeting, index, count)
        except RuntimeError as error:
            self.close()
            line = str(error).partition("\n")[0]
            raise PeerError(f"torch could not connect all {count} members: {line}") from None

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        sizes, names = tuple(axes.values()), tuple(axes.keys())
        with self._noting():
            return init_device_mesh(self._device, sizes, mesh_dim_names=names)

    def cut(self) -> None:
        """Break all connections, from any thread, so that waits at both ends of them fail.

        gloo cannot be interrupted, and it keeps its connections for as long as anything refers to
        its groups, as sharded models do.
        """
        for name, target in self._sockets:
            with suppress(OSError):  # it is closed already, or not connected
                if str(Path("/proc/self/fd", name).readlink()) == target:
                    self._break(int(name))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if not self._asked_for:
            os.unsetenv(_INTERFACE)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note the sockets that are opened in the `with` block, for `cut`."""
        before = _sockets()
        yield
        self._sockets |= _sockets() - before

    def _break(self, descriptor: int) -> None:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            if found.getpeername()[1] != self._meeting.port:  # keep the store's connection
                found.shutdown(socket.SHUT_RDWR)

    def _meet(self, meeting: Rendezvous, index: int, count: int) -> None:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo",
            store=PrefixStore("world", meeting.store),
            rank=index,
            world_size=count,
            timeout=timedelta(seconds=meeting.deadline),
        )


def _sockets() -> set[tuple[str, str]]:
    """Return this process's open sockets: descriptor, and the kernel's name for it."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed while we look
            found.add((entry.name, str(entry.readlink())))
    return {(name, target) for name, target in found if target.startswith("socket:")}
