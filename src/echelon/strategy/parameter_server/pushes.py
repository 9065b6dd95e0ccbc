"""One trainer's gradients on their way to the servers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.comm.ps.client import Servers
from echelon.optim import gradients

_PIECE = 1 << 18
"""Values copied at a time: their norm is taken while they are in the cache."""

_ALL = -1
"""Stands for all parameters together."""


class Filled(NamedTuple):
    """What is in the slots once all gradients are."""

    row: list[float]
    finite: bool
    square: float
    """Of the norm of all gradients."""
    missing: list[int]
    """Parameters without a gradient."""


class Pushes:
    """begin → put … put (or put_all) → filled; the servers read the slots when they are told to.

    What is computed into a slot, where there is `room`, is `written` instead of put.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._slots = servers.slots
        self._sends = servers.sends
        self.found = list(self._slots)
        """Where the gradients of the last push lie."""
        self._pieces = [
            slot.view(-1).split(_PIECE) if slot.is_contiguous() else () for slot in servers.slots
        ]
        self._begun: list[float] = []
        self._norms: dict[int, list[Tensor]] = {}
        """Per parameter, of the pieces of its gradient."""
        self._put: set[int] = set()

    def begin(self, row: Sequence[float]) -> None:
        """Before the update's last backward."""
        self._begun = list(row)
        self._norms, self._put = {}, set()
        self.end()

    def end(self) -> None:
        """The push is answered: nobody looks at its gradients any more."""
        self.found = list(self._slots)

    def put(self, at: int, gradient: Tensor) -> None:
        """The gradient of parameter `at` is final: it is looked at while it is in the cache."""
        if self._sends and self._alike(at, gradient):
            self._give(at, gradient.detach())
            self._norms[at] = [gradients.global_norm([gradient])]
        elif self._alike(at, gradient):
            parts = gradient.detach().view(-1).split(_PIECE)
            norms = self._norms[at] = []
            for slot, part in zip(self._pieces[at], parts, strict=True):
                slot.copy_(part)
                norms.append(gradients.global_norm([part]))
        else:
            self._slots[at].copy_(gradient)
            self._norms[at] = [gradients.global_norm([gradient])]
        self._is_put(at)

    def room(self, at: int, dtype: torch.dtype) -> Tensor | None:
        """Where a gradient of this type may be computed into; `written` has to follow."""
        slot = self._slots[at]
        return slot if not self._sends and self._pieces[at] and slot.dtype == dtype else None

    def written(self, at: int) -> None:
        """The gradient is in its slot."""
        self._norms[at] = [gradients.global_norm([piece]) for piece in self._pieces[at]]
        self._is_put(at)

    def add(self, at: int, gradient: Tensor) -> None:
        """The rest of one that was `written`."""
        self._slots[at].add_(gradient)
        self.written(at)

    def _is_put(self, at: int) -> None:
        self._put.add(at)
        self._servers.ready(at)

    def put_all(self, found: Sequence[Tensor | None]) -> None:
        """All at once; None is no gradient."""
        given = {at: gradient for at, gradient in enumerate(found) if gradient is not None}
        if given:
            torch._foreach_copy_([self._slots[at] for at in given], list(given.values()))
            self._norms[_ALL] = [gradients.global_norm(list(given.values()))]
        self._put.update(given)

    def _alike(self, at: int, gradient: Tensor) -> bool:
        """Whether it lies in memory as its slot does."""
        alike = gradient.is_cpu and gradient.dtype == self._slots[at].dtype
        return alike and gradient.is_contiguous() and bool(self._pieces[at])

    def _give(self, at: int, gradient: Tensor) -> None:
        """It is sent from where it is."""
        self.found[at] = gradient
        self._servers.give(at, gradient.view(-1))

    def filled(self, others: Sequence[Tensor] = ()) -> Filled:
        """No gradient counts as one of zeros. `others` go with them, but have no slot."""
        norms = [norm for found in self._norms.values() for norm in found]
        norms += [gradients.global_norm([other]) for other in others]
        missing = [at for at in range(len(self._slots)) if at not in self._put]
        for at in missing:
            self._slots[at].zero_()
        square = sum(float(norm) ** 2 for norm in norms)
        # A norm may be too large a number where no gradient is.
        whole = (*self.found, *others)
        finite = math.isfinite(square) or all(bool(s.isfinite().all()) for s in whole)
        return Filled(self._begun, finite, square, missing)
