"""What every transport carries: 100 MB of gradients there, an update, 100 MB of weights back."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

NUMBERS = 25_000_000
"""float32: 100 MB."""
CHUNK = 1 << 20
"""Bytes of a message, for those who cut."""
REQUEST = 4096
LR = 0.01
LOOPBACK = "127.0.0.1"


class Client(Protocol):
    """A trainer's side. Gradients lie where the transport wants them; so do weights afterwards."""

    def exchange(self) -> None:
        """Push, apply, pull."""

    def ask(self) -> None:
        """A small request and its answer, of `REQUEST` bytes each."""

    def close(self) -> None: ...


class Shard:
    """What a server that others wrote holds: weights, gradients, and torch's fused kernel."""

    def __init__(self, optimizer: str = "sgd") -> None:
        self.weights, self.gradients = touched(), touched()
        self.weights.requires_grad_(True)
        self._parts = [
            part.detach().requires_grad_(True) for part in self.weights.detach().split(CHUNK // 4)
        ]
        for part, gradient in zip(self._parts, self.gradients.split(CHUNK // 4), strict=True):
            part.grad = gradient
        self._steps = [bare(optimizer, part) for part in self._parts]

    def chunks(self) -> Iterator[Tensor]:
        """The new weights, each chunk as soon as its update is made."""
        for part, step in zip(self._parts, self._steps, strict=True):
            step()
            yield part.detach()


def bare(optimizer: str, parameter: Tensor) -> Callable[[], object]:
    """A step of torch's own fused optimizer."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    made: torch.optim.Optimizer = kinds[optimizer]([parameter], lr=LR, fused=True)
    return made.step


def touched(numbers: int = NUMBERS) -> Tensor:
    """Memory whose pages are all there: a first touch costs more than a copy."""
    return torch.full((numbers,), 1e-3)


def flat(tensor: Tensor) -> memoryview:
    """Its bytes."""
    return tensor.numpy().data.cast("B")


def outward() -> str | None:
    """An address of this machine that is not loopback, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        found = str(asking.getsockname()[0])
    return None if found.startswith("127.") else found


def timed(act: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        act()
        found.append((time.perf_counter() - start) * 1e3)
    return found
