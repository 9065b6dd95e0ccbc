"""What every sum of gradients has in common: gradients arrive, buckets get full."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import cast

import torch
from torch import Tensor

from echelon.comm.interface import MOST_IN_ROW, Collective
from echelon.comm.layout import Bucket


class Filling:
    """One member's gradients of one update, and which of them are there."""

    slots: list[Tensor]

    def __init__(self, parameters: int, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._bucket_of = [0] * parameters
        for number, bucket in enumerate(buckets):
            for at in bucket.parameters:
                self._bucket_of[at] = number
        self._sizes = [len(bucket.parameters) for bucket in buckets]
        self._lacking: list[int] = []
        self._seen = bytearray(parameters)
        self._row: list[float] = []
        self._full = 0  # so many buckets are, from the first one on
        self._update = 0
        self._running = self._entered = False

    def begin(self, row: Sequence[float]) -> None:
        self._check()
        assert not self._running, "the last update's gradients are not finished"
        assert 0 < len(row) <= MOST_IN_ROW, f"a row of {len(row)} values"
        self._running, self._entered = True, False
        self._update += 1
        self._full = 0
        self._row = list(row)
        self._lacking = self._sizes.copy()
        self._seen = bytearray(len(self._seen))
        self._begun()

    def put(self, at: int, gradient: Tensor) -> None:
        self._check()
        assert self._running, "put before begin"
        assert not self._seen[at], f"the gradient of parameter {at} came twice"
        if not self._entered:
            self._enter()
        self.slots[at].copy_(gradient)
        self._seen[at] = 1
        bucket = self._bucket_of[at]
        self._lacking[bucket] -= 1
        if not self._lacking[bucket]:
            self._advance()

    def put_all(self, gradients: Sequence[Tensor | None]) -> None:
        self._check()
        assert self._running, "put before begin"
        assert len(gradients) == len(self._seen), f"{len(gradients)} gradients"
        assert not any(self._seen), "put_all after put"
        self._enter()
        if any(map(is_, gradients, repeat(None))):
            for number, bucket in enumerate(self._buckets):
                self._put_some(number, bucket, gradients)
        else:
            self._put_whole(cast("Sequence[Tensor]", gradients))

    def _put_whole(self, gradients: Sequence[Tensor]) -> None:
        slots = self.slots
        for number, bucket in enumerate(self._buckets):
            held = bucket.parameters
            torch._foreach_copy_([slots[at] for at in held], [gradients[at] for at in held])
            self._lacking[number] = 0
            self._advance()
        self._seen = bytearray(b"\1" * len(self._seen))

    def _put_some(self, number: int, bucket: Bucket, gradients: Sequence[Tensor | None]) -> None:
        for at in bucket.parameters:
            gradient = gradients[at]
            if gradient is not None:
                self.slots[at].copy_(gradient)
                self._seen[at] = 1
                self._lacking[number] -= 1
        if not self._lacking[number]:
            self._advance()

    def _fill_rest(self) -> list[int]:
        """Zeros where no gradient came; returns where that was."""
        self._check()
        assert self._running, "finish before begin"
        self._running = False
        if self._full == len(self._buckets):
            return []
        absent: list[int] = []
        for number, bucket in enumerate(self._buckets):
            if self._lacking[number]:
                absent += [at for at in bucket.parameters if not self._seen[at]]
        if not self._entered:
            self._enter()
        for at in absent:
            self.slots[at].zero_()
        self._lacking = [0] * len(self._buckets)
        self._absent(absent)
        self._advance()
        return absent

    def _advance(self) -> None:
        """A bucket got full: tell how many are, from the first one on."""
        full = self._full
        while full < len(self._buckets) and not self._lacking[full]:
            full += 1
        if full > self._full:
            self._full = full
            self._filled(full)

    def release(self) -> None:
        """Nobody else reads these results."""

    def _missing(self, collective: Collective, absent: Sequence[int], lacking: float) -> list[int]:
        """Parameters without a gradient everywhere. `lacking`: so many members lack some."""
        if lacking < collective.count:
            return []
        had = torch.ones(len(self._seen), dtype=torch.int64)
        had[list(absent)] = 0
        had = had.to(self.slots[0].device)
        collective.sum_(had)
        return [at for at, members in enumerate(had.tolist()) if members == 0]

    def _check(self) -> None:
        """Raise if the others cannot be reached any more."""

    def _begun(self) -> None:
        """An update begins."""

    def _enter(self) -> None:
        """Before the first gradient is written."""
        self._entered = True

    def _absent(self, absent: Sequence[int]) -> None:
        """Before the last buckets are declared full: these parameters have no gradient here."""

    def _filled(self, buckets: int) -> None:
        """So many buckets are full, from the first one on."""
