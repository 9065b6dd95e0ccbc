"""Adding up, dividing and checking gradients, piece by piece while a piece is in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PIECE = 256 * 1024
"""Bytes; fits the second-level cache with as many bytes of another member."""
_LARGEST = torch.finfo(torch.float32).max


class Divider:
    """Divides tensors by a number and remembers whether all that came out was finite."""

    def __init__(self, device: torch.device) -> None:
        self._flag = torch.zeros((), device=device)
        self._factor = torch.ones((), device=device)
        self._one = torch.ones((), device=device)
        self._divisor = 1.0
        self._scratch = torch.empty(0, device=device)

    def set(self, divisor: float) -> None:
        if divisor != self._divisor:  # updates of equal weight follow each other
            self._divisor = divisor
            factor = 1 / divisor if divisor else 0.0
            self._factor.fill_(factor if abs(factor) <= _LARGEST else math.inf)

    def finite(self) -> bool:
        """Of everything divided since the last call."""
        if self._flag.item() == 0:
            return math.isfinite(self._divisor)
        self._flag.zero_()
        return False

    def divide_(self, tensor: Tensor) -> None:
        """A divisor of 0 (no member had any weight) gives zeros."""
        if self._divisor == 0:
            tensor.zero_()
        elif tensor.dtype == torch.float32:
            self._multiply_(tensor, self._factor)
            if abs(self._divisor) < 1:  # the kernel looks before it scales: this may overflow
                self._multiply_(tensor, self._one)
        else:  # the kernel's factor is single precision, and halves overflow in other ways
            tensor.div_(self._divisor)
            self._multiply_(tensor, self._one)

    def mean_(self, total: Tensor, parts: Sequence[Tensor]) -> None:
        """`total` = Σ parts / divisor; the first part may be `total` itself."""
        if total.dtype.itemsize >= 4:
            add_up_(total, parts)
            self.divide_(total)
            return
        sums = self._single(parts)
        if self._divisor != 0:
            sums.div_(self._divisor)
        else:
            sums.zero_()
        total.copy_(sums)
        self._multiply_(total, self._one)

    def sum_(self, total: Tensor, parts: Sequence[Tensor]) -> None:
        """`total` = Σ parts, halves added up in single precision."""
        if total.dtype.itemsize >= 4:
            add_up_(total, parts)
        else:
            total.copy_(self._single(parts))

    def _single(self, parts: Sequence[Tensor]) -> Tensor:
        """Σ parts of halves in single precision: free, as a piece does not leave the cache."""
        if self._scratch.numel() < parts[0].numel():
            with torch.inference_mode(False):  # an evaluation may come first, updates use it too
                self._scratch = self._scratch.new_empty(parts[0].numel())
        sums = self._scratch[: parts[0].numel()]
        add_up_(sums, (sums.copy_(parts[0]), *parts[1:]))
        return sums

    def _multiply_(self, tensor: Tensor, factor: Tensor) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_([tensor], self._flag, factor)


def add_up_(total: Tensor, parts: Sequence[Tensor]) -> None:
    """In the order of `parts`; the first may be `total` itself."""
    if total is parts[0]:
        rest = parts[1:]
    elif len(parts) == 1:
        total.copy_(parts[0])
        return
    else:
        torch.add(parts[0], parts[1], out=total)
        rest = parts[2:]
    for part in rest:
        total.add_(part)


def square_sum(tensors: Sequence[Tensor]) -> float:
    """Σ of squares, in double precision but for what is inside of one piece.

    torch adds up a tensor in its own precision: a few million equal values are off by 1e-3.
    """
    total = 0.0
    for low in (True, False):
        held = [t for t in tensors if (t.itemsize < 4) == low and t.numel()]
        alike = [piece for t in held for piece in t.split(PIECE // 4)]
        if alike:
            norms = torch._foreach_norm(alike, 2, dtype=torch.float32 if low else None)
            found = torch.stack([norm.double() for norm in norms])
            total += float(found.square_().sum())
    return total
