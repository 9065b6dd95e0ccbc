"""torch's own world of processes, for the engines that are built on it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from echelon.comm.rendezvous import Rendezvous

_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


class TorchWorld:
    """torch.distributed between all members, on the store they met at."""

    def __init__(self, meeting: Rendezvous, index: int, count: int, device: torch.device) -> None:
        self._device = device.type
        # torch's groups listen where the host name points to, unless told so; and only so.
        name = _interface(meeting.address)
        self._set = name is not None and _INTERFACE not in os.environ
        if self._set:
            os.environ[_INTERFACE] = str(name)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("world", meeting.store),
            rank=index,
            world_size=count,
            timeout=timedelta(seconds=meeting.deadline),
        )

    def mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        return init_device_mesh(
            self._device, tuple(axes.values()), mesh_dim_names=tuple(axes.keys())
        )

    def close(self) -> None:
        dist.destroy_process_group()
        if self._set:
            del os.environ[_INTERFACE]


def _interface(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    try:
        wanted = socket.inet_aton(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address
                continue
            if found[20:24] == wanted:
                return name
    return None
