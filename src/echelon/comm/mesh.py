"""torch's own world of processes, for the engines that are built on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

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
        self._asked_for = ",".join(meeting.interfaces)
        # Whoever cannot come is missed here, where the store is watched, not inside torch.
        meeting.gather("world", range(count), "")
        if where := self._asked_for or interface_of(meeting.address):
            os.putenv(_INTERFACE, where)
        try:
            self._meet(meeting, index, count)
        except RuntimeError as error:
            self.close()
            line = str(error).partition("\n")[0]
            raise PeerError(f"torch could not connect all {count} members: {line}") from None

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        sizes, names = tuple(axes.values()), tuple(axes.keys())
        return init_device_mesh(self._device, sizes, mesh_dim_names=names)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        if not self._asked_for:
            os.unsetenv(_INTERFACE)

    def _meet(self, meeting: Rendezvous, index: int, count: int) -> None:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self._device == "cuda" else "gloo",
            store=PrefixStore("world", meeting.store),
            rank=index,
            world_size=count,
            timeout=timedelta(seconds=meeting.deadline),
        )
