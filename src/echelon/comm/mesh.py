"""torch's own world of processes, for the engines that are built on it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.comm.rendezvous import Rendezvous


class TorchWorld:
    """torch.distributed between all members, on the store they met at.

    Its gloo listens where GLOO_SOCKET_IFNAME says, or else where the host's name points to.
    """

    def __init__(self, meeting: Rendezvous, index: int, count: int, device: torch.device) -> None:
        self._device = device.type
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("world", meeting.store),
            rank=index,
            world_size=count,
            timeout=timedelta(seconds=meeting.deadline),
        )

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        sizes, names = tuple(axes.values()), tuple(axes.keys())
        return init_device_mesh(self._device, sizes, mesh_dim_names=names)

    def close(self) -> None:
        dist.destroy_process_group()
