"""Gradient buckets: layout, filling, kernels."""

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

# --- layout ---
# Which gradient lies where: flat buckets, the last parameters first, as backward fills them.

ALIGN = 64  # bytes: a cache line, so that no two members write the same one


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients of one dtype, one behind the other. No gaps: whatever is in it counts."""

    dtype: torch.dtype
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int

    @property
    def bytes(self) -> int:
        return _aligned(self.size * self.dtype.itemsize)


def plan(parameters: Sequence[Tensor], limit: int) -> list[Bucket]:
    """Buckets of at most `limit` bytes, or of one larger parameter, in the order they get full."""
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


def carve(memory: Tensor, buckets: Sequence[Bucket]) -> list[Tensor]:
    """Each bucket's place in bytes of memory, one behind the other."""
    flats, start = [], 0
    for bucket in buckets:
        stop = start + bucket.size * bucket.dtype.itemsize
        flats.append(memory[start:stop].view(bucket.dtype))
        start += bucket.bytes
    return flats


def total_bytes(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.bytes for bucket in buckets)


def views(
    parameters: Sequence[Tensor], buckets: Sequence[Bucket], flats: Sequence[Tensor]
) -> list[Tensor]:
    """Per parameter, its place in the buckets, shaped and strided like it."""
    found: dict[int, Tensor] = {}
    for bucket, flat in zip(buckets, flats, strict=True):
        for at, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            like = torch.empty_like(parameters[at], device="meta")  # dense, even if it is not
            start = flat.storage_offset() + offset
            found[at] = flat.as_strided(like.shape, like.stride(), start)
    return [found[at] for at in range(len(parameters))]


def slices(size: int, itemsize: int, parts: int) -> list[slice]:
    """`size` elements cut into even parts at the ends of cache lines; small ones may be empty."""
    line = ALIGN // itemsize
    lines = -(-size // line)
    cuts = [min(lines * part // parts * line, size) for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def pieces(start: int, stop: int, step: int) -> Iterator[slice]:
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


# --- filling ---
# What every sum of gradients has in common: gradients arrive, buckets get full.


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


# --- kernels ---
# Adding up, dividing and checking gradients, piece by piece while a piece is in the cache.

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
