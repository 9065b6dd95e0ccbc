"""What each layer costs: forward and backward, measured on real samples."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from echelon.strategy.pipeline.line import can_pass

REPEATS = 3
BYTES_PER_SECOND = 1e9
"""What passes between two members: gloo on one host. Decides between cuts of like time only."""


class Cost(NamedTuple):
    """Of one layer."""

    seconds: float
    passing: float
    """Seconds that its output and the gradient of it are on their way, if cut behind it."""


def measure(
    layers: Sequence[nn.Module], x: Any, autocast: Callable[[], AbstractContextManager[object]]
) -> list[Cost]:
    """Each layer on what the one before it gave; the fastest of a few times."""
    costs: list[Cost] = []
    for layer in layers:
        y, seconds = _timed(layer, x, autocast)
        for _ in range(REPEATS):
            y, again = _timed(layer, x, autocast)
            seconds = min(seconds, again)
        costs.append(Cost(seconds, _passing(y)))
        layer.zero_grad(set_to_none=True)
        x = y.detach() if isinstance(y, Tensor) else y
    return costs


def _timed(
    layer: nn.Module, x: Any, autocast: Callable[[], AbstractContextManager[object]]
) -> tuple[Any, float]:
    if isinstance(x, Tensor):
        learnt = x.is_floating_point()
        x = x.detach().requires_grad_(learnt).clone()  # the layer may write over it
    start = _clock(x)
    with autocast():
        y = layer(x)
    if isinstance(y, Tensor) and y.requires_grad:
        y.backward(torch.ones_like(y))
    return y, _clock(y) - start


def _clock(x: Any) -> float:
    if isinstance(x, Tensor) and x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _passing(y: Any) -> float:
    if not can_pass(y):
        return float("inf")
    return 2 * y.numel() * y.element_size() / BYTES_PER_SECOND


@contextmanager
def traceless(model: nn.Module) -> Iterator[None]:
    """Whatever is tried in here leaves buffers, gradients and random numbers as they were."""
    buffers = list(model.buffers())
    kept = [buffer.clone() for buffer in buffers]
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        with torch.no_grad():
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
        model.zero_grad(set_to_none=True)
