"""Gradients in memory of one's own, added up over the wire bucket by bucket, if there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.comm.filling import Filling
from echelon.comm.interface import Collective, Sums
from echelon.comm.kernels import Divider, square_sum
from echelon.comm.layout import plan, slices, views

if TYPE_CHECKING:
    from torch.distributed import Work

    from echelon.comm.wire import Wire

BUCKET = 25 * 1024 * 1024
"""As in DDP: a message between hosts should be worth its round trip."""


class PrivateSum(Filling):
    """Halves are added up as what they are, like in DDP: twice the bytes would cost more."""

    shared = False

    def __init__(
        self, collective: Collective, parameters: Sequence[Tensor], wire: Wire | None = None
    ) -> None:
        super().__init__(len(parameters), plan(parameters, BUCKET))
        self._collective, self._wire = collective, wire
        device = parameters[0].device
        self._divider = Divider(device)
        self._flats = [torch.zeros(b.size, dtype=b.dtype, device=device) for b in self._buckets]
        self.results = self.slots = views(parameters, self._buckets, self._flats)
        self._works: list[Work] = []
        self._sent = 0

    def finish(self) -> Sums:
        absent = self._fill_rest()
        mine = [float(bool(absent)), *self._row]
        rows = [mine] if self._wire is None else self._wire.gather(mine)
        lacking, *row = [sum(column) for column in zip(*rows, strict=True)]
        for work in self._works:
            self._end(work)
        self._works.clear()
        self._divider.set(row[0])
        for flat in self._flats:
            self._divider.divide_(flat)
        missing = self._missing(self._collective, absent, lacking)
        return Sums(row, self._divider.finite(), missing)

    def scale_(self, factor: float) -> None:
        torch._foreach_mul_(self._flats, factor)

    def clamp_(self, limit: float) -> None:
        for flat in self._flats:
            flat.clamp_(-limit, limit)

    def norm(self) -> float:
        """Each member measures a slice: processors that differ may round differently."""
        count, index = self._collective.count, self._collective.index
        mine = [flat[slices(flat.numel(), flat.itemsize, count)[index]] for flat in self._flats]
        return math.sqrt(self._collective.sum([square_sum(mine)])[0])

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._works = []

    def _check(self) -> None:
        if self._wire is not None:
            self._wire.check()

    def _begun(self) -> None:
        self._sent = 0

    def _filled(self, buckets: int) -> None:
        if self._wire is None:
            return
        for flat in self._flats[self._sent : buckets]:
            self._works.append(self._wire.begin_sum(flat))
        self._sent = buckets

    def _end(self, work: Work) -> None:
        assert self._wire is not None
        self._wire.end(work)
