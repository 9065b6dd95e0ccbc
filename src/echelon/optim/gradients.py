"""What is done to all gradients of a step at once: divide, check, measure, clip."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

_kind = attrgetter("device", "dtype")
_PIECE = 1 << 16
_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def finish_(grads: list[Tensor], divisor: float) -> bool:
    """Divide by `divisor` (loss weight × loss scale); False if any value is not finite.

    Both in one pass. Where it says False, the gradients are spoilt and must be dropped.
    """
    assert 0 < divisor < math.inf, f"gradients cannot be divided by {divisor}"
    finite = True
    for alike in _grouped(grads):
        if alike[0].dtype == torch.float64:  # the kernel's factor is single precision
            torch._foreach_div_(alike, divisor)
            finite &= _multiply_(alike, 1.0)
            continue
        finite &= _multiply_(alike, 1 / divisor)
        if divisor < 1:  # the kernel looks at values before it scales them: these may overflow
            finite &= _multiply_(alike, 1.0)
    return finite


def global_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients taken as one vector."""
    if not grads:
        return torch.zeros(())
    parts = [torch.stack(_norms(_cut_up(alike))) for alike in _grouped(grads)]
    first = parts[0]
    norms = first if len(parts) == 1 else torch.cat([part.to(first.device) for part in parts])
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def clip_norm_(grads: list[Tensor], limit: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `limit`; returns the old norm."""
    norm = global_norm(grads)
    if norm.is_cpu:  # looking is free here; on a GPU it would wait for the device
        if (scale := clip_factor(norm.item(), limit)) < 1:
            torch._foreach_mul_(grads, scale)
        return norm
    factor = (limit / (norm + _EPS)).clamp_(max=1.0)
    for alike in _grouped(grads):
        torch._foreach_mul_(alike, factor.to(alike[0].device))
    return norm


def clip_factor(norm: float, limit: float) -> float:
    """What gradients of this norm are multiplied with, if it is below 1."""
    return limit / (norm + _EPS)


def clip_value_(grads: list[Tensor], limit: float) -> None:
    """Clamp every single value to [-limit, limit]."""
    for alike in _grouped(grads):
        torch._foreach_clamp_min_(alike, -limit)
        torch._foreach_clamp_max_(alike, limit)


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first gradient with a NaN or an infinity in it. Slow: for the error line."""
    for name, grad in named:
        if not bool(torch.isfinite(grad).all()):
            return name
    return None


def layer_norms(named: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    """The 2-norm of every gradient by name, with one wait for each device and dtype."""
    pairs = list(named)
    norms: dict[int, float] = {}
    for alike in _grouped([grad for _, grad in pairs]):
        values = torch.stack(_norms(alike)).tolist()
        norms.update(zip(map(id, alike), values, strict=True))
    return {name: norms[id(grad)] for name, grad in pairs}


def _grouped(grads: list[Tensor]) -> list[list[Tensor]]:
    """Gradients of one device and dtype each; nearly always that is all of them."""
    kinds = set(map(_kind, grads))
    if len(kinds) == 1:
        return [grads]
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for grad in grads:
        groups[_kind(grad)].append(grad)
    return list(groups.values())


def _cut_up(grads: list[Tensor]) -> list[Tensor]:
    """Large ones in pieces: a CPU adds up squares in single precision, and after some millions of
    them the norm is off by 1e-4, and by 1e-3 if they are all alike."""
    if not grads[0].is_cpu or all(grad.numel() <= _PIECE for grad in grads):
        return grads
    return [piece for grad in grads for piece in grad.reshape(-1).split(_PIECE)]


def _norms(grads: list[Tensor]) -> list[Tensor]:
    """Half-precision values are squared and added up in single precision."""
    low = grads[0].dtype.itemsize < 4
    return list(torch._foreach_norm(grads, 2, dtype=torch.float32 if low else None))


@dataclass(slots=True)
class _Scratch:
    """The flag that torch's kernel raises, and the factor that it reads."""

    flag: Tensor
    scale: Tensor
    factor: float = 1.0


class _PerThread(threading.local):
    """Scratch by device. Threads do not share it: each waits for its own flag."""

    def __init__(self) -> None:
        self.scratch: dict[torch.device, _Scratch] = {}

    def on(self, device: torch.device) -> _Scratch:
        found = self.scratch.get(device)
        if found is None:
            flag, scale = torch.zeros((), device=device), torch.ones((), device=device)
            found = self.scratch[device] = _Scratch(flag, scale)
        return found


_mine = _PerThread()


def _multiply_(grads: list[Tensor], factor: float) -> bool:
    scratch = _mine.on(grads[0].device)
    if factor != scratch.factor:  # batches of equal weight follow each other
        scratch.scale.fill_(factor)
        scratch.factor = factor
    torch._amp_foreach_non_finite_check_and_unscale_(grads, scratch.flag, scratch.scale)
    if scratch.flag.item() == 0:
        return True
    scratch.flag.zero_()
    return False
