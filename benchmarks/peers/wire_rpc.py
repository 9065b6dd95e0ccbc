"""torch.distributed.rpc: one call, the gradients there and the server's weights back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from .wire_work import LR, NUMBERS, REQUEST, touched

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "cma": {"_transports": ["uv"], "_channels": ["cma", "basic"]},
    "tcp": {"_transports": ["uv"], "_channels": ["basic"]},
}
"""How tensors travel: as torch chooses, read from the other's memory by one system call, or over
TCP as between hosts."""
_SERVER = "server"
_weights: list[Tensor] = []
"""The server's: functions called from elsewhere have no other place for them."""


def serve(ready: Callable[[str], None], setting: str) -> None:
    weights = touched()
    weights.requires_grad_(True)
    _weights.append(weights)
    folder = tempfile.mkdtemp()
    ready(folder)
    _join(0, folder, setting)
    rpc.shutdown()


def push_pull(gradients: Tensor) -> Tensor:
    [weights] = _weights
    weights.grad = gradients
    _step(weights)
    return weights.detach()


_optimizers: list[torch.optim.Optimizer] = []


def _step(weights: Tensor) -> None:
    if not _optimizers:
        _optimizers.append(torch.optim.SGD([weights], lr=LR, fused=True))
    _optimizers[0].step()


def echo(request: Tensor) -> Tensor:
    return request


class Caller:
    def __init__(self, folder: str, setting: str) -> None:
        self._gradients, self._small = touched(NUMBERS), touched(REQUEST // 4)
        _join(1, folder, setting)

    def exchange(self) -> None:
        rpc.rpc_sync(_SERVER, push_pull, (self._gradients,))

    def ask(self) -> None:
        rpc.rpc_sync(_SERVER, echo, (self._small,))

    def close(self) -> None:
        rpc.shutdown()


def _join(rank: int, folder: str, setting: str) -> None:
    rpc.init_rpc(
        "caller" if rank else _SERVER,
        rank=rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=4,
            init_method=f"file://{Path(folder) / 'meeting'}",
            **SETTINGS[setting],
        ),
    )
