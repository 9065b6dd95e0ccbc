"""Echelon's parameter server itself: a server process with its gate, and one trainer."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from echelon.comm.ps.client import Servers
from echelon.comm.ps.layout import Layout
from echelon.comm.ps.messages import ShardAddress
from echelon.core.config import OptimizerSection
from echelon.core.types import Lease
from echelon.server.process import serve as serve_shard
from echelon.server.shard import ServerSettings

from .wire_work import LOOPBACK, LR, NUMBERS

KEY = bytes(range(32))
_TENSORS = 25
_DEADLINE = 60.0


def serve(ready: Callable[[str], None], host: str = LOOPBACK) -> None:
    tcp = socket.create_server((host, 0))
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    port = tcp.getsockname()[1]
    name = f"echelon-wire-{port}"
    near.bind(f"\0{name}")
    near.listen()
    ready(json.dumps([host, port, name]))
    address = ShardAddress(0, host, port, name)
    serve_shard([tcp, near], ServerSettings(0, (address,), KEY, _DEADLINE))


def connected(where: str, plane: str) -> Servers:
    host, port, name = json.loads(where)
    shard = ShardAddress(0, host, port, name)
    return Servers([shard], KEY, 0, plane=plane, deadline=_DEADLINE)


def rules_of(optimizer: str) -> dict[str, Any]:
    """Of one trainer, synchronous."""
    section = OptimizerSection.model_validate({"name": optimizer, "lr": LR})
    return {
        "optimizer": section.model_dump(mode="json"),
        "staleness": 0,
        "quorum": "all",
        "samples": 1 << 40,
    }


class Caller:
    """Pushes 25 tensors of 4 MB each, as a strategy does after a backward."""

    def __init__(self, where: str, plane: str, optimizer: str) -> None:
        self._servers = connected(where, plane)
        names = [f"layer.{at}" for at in range(_TENSORS)]
        weights = [torch.full((NUMBERS // _TENSORS,), 1e-3) for _ in names]
        layout = Layout.of(names, [nn.Parameter(w) for w in weights], [True] * _TENSORS)
        assert self._servers.set_up(layout, rules_of(optimizer))
        model = dict(zip(names, weights, strict=True))
        self._servers.upload({"model": model, "version": 0})
        self._servers.enter(1, [0])
        self._version = self._servers.pull()
        for slot in self._servers.slots:
            slot.fill_(1e-3)

    def exchange(self) -> None:
        version = self._version
        self._servers.push(Lease(0, version, version + 1), version, [1.0, 1.0, 1.0, 0.0, 0.01])
        outcome = self._servers.outcome()
        assert outcome.kind == "applied", outcome
        self._version = outcome.version

    def ask(self) -> None:
        self._servers.records(self._version)

    def close(self) -> None:
        self._servers.close()
