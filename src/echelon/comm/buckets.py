"""Gradient buckets: where each gradient lies, when a bucket is full, and how buckets are added up.

`plan` puts the gradients into flat buckets, the last parameters first, because backward finishes
those first. `Filling` is the base of every gradient sum: it copies gradients into the buckets and
notes which buckets are full. `Divider` and the functions below it do the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from operator import is_
from typing import cast

import torch
from torch import Tensor

from echelon.comm.interface import MOST_IN_ROW, Collective

ALIGN = 64  # bytes: a cache line, so that two members never write to the same line
PIECE = 256 * 1024
"""Bytes; fits the second-level cache twice: a piece of this member, and of another one."""
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype, one behind the other. No gaps: norms include every value in it."""

    dtype: torch.dtype
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int

    @property
    def bytes(self) -> int:
        return _aligned(self.size * self.dtype.itemsize)


def plan(parameters: Sequence[Tensor], limit: int) -> list[Bucket]:
    """Return buckets of at most `limit` bytes, in the order in which backward fills them.

    A parameter of more than `limit` bytes has a bucket of its own.
    """
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, list[int]] = {}
    for at in reversed(range(len(parameters))):
        held = filling.setdefault(parameters[at].dtype, [])
        if held and sum(parameters[i].nbytes for i in held) + parameters[at].nbytes > limit:
            buckets.append(_bucket(parameters, held))
            held.clear()
        held.append(at)
    buckets += [_bucket(parameters, held) for held in filling.values()]
    return sorted(buckets, key=lambda bucket: -bucket.parameters[-1])


def _bucket(parameters: Sequence[Tensor], held: Sequence[int]) -> Bucket:
    offsets, size = [], 0
    for at in held:
        offsets.append(size)
        size += parameters[at].numel()
    return Bucket(parameters[held[0]].dtype, tuple(held), tuple(offsets), size)


def views(
    parameters: Sequence[Tensor], buckets: Sequence[Bucket], flats: Sequence[Tensor]
) -> list[Tensor]:
    """Return each parameter's place in the buckets, shaped and strided like the parameter."""
    found: dict[int, Tensor] = {}
    for bucket, flat in zip(buckets, flats, strict=True):
        for at, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            like = torch.empty_like(
                parameters[at], device="meta"
            )  # dense, even if the parameter is not
            start = flat.storage_offset() + offset
            found[at] = flat.as_strided(like.shape, like.stride(), start)
    return [found[at] for at in range(len(parameters))]


def carve(memory: Tensor, buckets: Sequence[Bucket]) -> list[Tensor]:
    """Divide bytes of memory among the buckets, one behind the other."""
    flats, start = [], 0
    for bucket in buckets:
        stop = start + bucket.size * bucket.dtype.itemsize
        flats.append(memory[start:stop].view(bucket.dtype))
        start += bucket.bytes
    return flats


def total_bytes(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.bytes for bucket in buckets)


def slices(size: int, itemsize: int, parts: int) -> list[slice]:
    """Cut `size` elements into even parts at cache lines; parts of a small tensor may be empty."""
    line = ALIGN // itemsize
    lines = -(-size // line)
    cuts = [min(lines * part // parts * line, size) for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def pieces(start: int, stop: int, step: int) -> Iterator[slice]:
    """Cut [start, stop) into slices of `step` elements; the last one may be shorter."""
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


class Filling:
    """One member's gradients of one update, and which of them have arrived.

    The base class of the gradient sums. A subclass provides `slots`, and overrides the hooks at the
    end of the class for what it does when an update begins or buckets get full.
    """

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
        self._full = 0  # buckets that are full, counted from the first one without a gap
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

    def release(self) -> None:
        """Do nothing: other members do not read these results."""

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
        """Write zeros where no gradient came, and return the parameters concerned."""
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
        """Count the full buckets again, and call `_filled` if there are more."""
        full = self._full
        while full < len(self._buckets) and not self._lacking[full]:
            full += 1
        if full > self._full:
            self._full = full
            self._filled(full)

    def _missing(self, collective: Collective, absent: Sequence[int], lacking: float) -> list[int]:
        """Return the parameters that no member has a gradient for.

        `lacking` is the number of members that lack some gradient.
        """
        if lacking < collective.count:
            return []
        had = torch.ones(len(self._seen), dtype=torch.int64)
        had[list(absent)] = 0
        had = had.to(self.slots[0].device)
        collective.sum_(had)
        return [at for at, members in enumerate(had.tolist()) if members == 0]

    def _check(self) -> None:
        """Raise if the other members cannot be reached any more."""

    def _begun(self) -> None:
        """Called when an update begins."""

    def _enter(self) -> None:
        """Called before the first gradient of an update is written."""
        self._entered = True

    def _absent(self, absent: Sequence[int]) -> None:
        """Called with the parameters without a gradient here, before the last `_filled`."""

    def _filled(self, buckets: int) -> None:
        """Called when the first `buckets` buckets are full."""


# Kernels. They work on one piece at a time, while it is in the cache.


class Divider:
    """Division of tensors by a number, remembering whether all results were finite."""

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
        """Return whether everything divided since the last call was finite."""
        if self._flag.item() == 0:
            return math.isfinite(self._divisor)
        self._flag.zero_()
        return False

    def divide_(self, tensor: Tensor) -> None:
        """Divide in place. A divisor of 0 (no member had any weight) gives zeros."""
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
        """Write Σ parts / divisor to `total`, which may be the first part itself."""
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
        """Write Σ parts to `total`; half precision is added up in single precision."""
        if total.dtype.itemsize >= 4:
            add_up_(total, parts)
        else:
            total.copy_(self._single(parts))

    def _single(self, parts: Sequence[Tensor]) -> Tensor:
        """Add up half-precision parts in single precision: free, as a piece stays in the cache."""
        if self._scratch.numel() < parts[0].numel():
            with torch.inference_mode(False):  # an evaluation may come first, updates use it too
                self._scratch = self._scratch.new_empty(parts[0].numel())
        sums = self._scratch[: parts[0].numel()]
        add_up_(sums, (sums.copy_(parts[0]), *parts[1:]))
        return sums

    def _multiply_(self, tensor: Tensor, factor: Tensor) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_([tensor], self._flag, factor)


def add_up_(total: Tensor, parts: Sequence[Tensor]) -> None:
    """Write Σ parts to `total`, adding in their order; the first may be `total` itself."""
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
    """Return Σ of squares, added up in double precision except inside a piece.

    torch adds up a tensor in the tensor's own precision: over a few million equal values that is
    off by 1e-3.
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
