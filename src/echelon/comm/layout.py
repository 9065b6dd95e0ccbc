"""Which gradient lies where: flat buckets, the last parameters first, as backward fills them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

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
