"""torch's own world of processes, for the engines that are built on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.comm.network import interface_of
from echelon.comm.rendezvous import Rendezvous
from echelon.core.errors import PeerError, UserError

_INTERFACE = "GLOO_SOCKET_IFNAME"


class TorchWorld:
    """torch.distributed between all members, on the store they met at.

    Its gloo can be told only through the environment where to listen. Left alone it listens where
    the host's name points to, which may be reachable by everybody, or by nobody.
    """

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
        # Whoever cannot come is missed here, where the store is watched, not inside torch.
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
        """Break all connections, from any thread: whoever waits in them, here or there, gives up.

        gloo has no way to be interrupted, and keeps its connections for as long as anything refers
        to its groups, as sharded models do.
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
        """Which sockets are opened meanwhile."""
        before = _sockets()
        yield
        self._sockets |= _sockets() - before

    def _break(self, descriptor: int) -> None:
        with socket.socket(fileno=os.dup(descriptor)) as found:
            if found.getpeername()[1] != self._meeting.port:  # the store is to be left in order
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
    """This process's open sockets: descriptor, and what the kernel calls it."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed while we look
            found.add((entry.name, str(entry.readlink())))
    return {(name, target) for name, target in found if target.startswith("socket:")}
