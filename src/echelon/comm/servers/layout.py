"""Which parameter lies where in the flats: one flat per dtype and penalty, in the model's order.

    flat 0, float32, penalised   │ 0.weight         │ 2.weight   │ 4.weight │
    flat 1, float32              │ 0.bias │ 2.bias │ 4.bias │

Every slot begins at a cache line, so there are small gaps. They hold zeros, in gradients too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from echelon.core.errors import PeerError

ALIGN = 64
"""Bytes: a cache line."""
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
MOST_SLOTS, LONGEST_NAME, MOST_AXES, MOST_VALUES = 1 << 20, 1024, 16, 1 << 42


class BadLayout(PeerError):
    """A peer's layout makes no sense."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: `size` values from `start` on, strided in there as in the model."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    penalised: bool
    flat: int
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size

    def of(self, flat: Tensor) -> Tensor:
        """This parameter, shaped, in its flat."""
        return self.shaped(flat[self.start : self.stop])

    def shaped(self, values: Tensor) -> Tensor:
        """Its values as they lie one behind the other, seen as the parameter."""
        return values.as_strided(self.shape, self.stride, values.storage_offset())


@dataclass(frozen=True, slots=True)
class Flat:
    dtype: torch.dtype
    penalised: bool
    size: int

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


_Entry = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, bool]


class Layout:
    """The slots, one for each parameter in the model's order, and the flats that hold them."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        kinds: dict[tuple[torch.dtype, bool], int] = {}
        sizes: list[int] = []
        self.slots: list[Slot] = []
        for name, shape, stride, dtype, penalised in entries:
            flat = kinds.setdefault((dtype, penalised), len(kinds))
            if flat == len(sizes):
                sizes.append(0)
            slot = Slot(name, shape, stride, dtype, penalised, flat, sizes[flat], prod(shape))
            self.slots.append(slot)
            sizes[flat] = _aligned(slot.stop, dtype)
        self.flats = [Flat(*kind, size) for kind, size in zip(kinds, sizes, strict=True)]

    @classmethod
    def of(
        cls, names: Sequence[str], parameters: Sequence[Tensor], penalised: Sequence[bool]
    ) -> Layout:
        # A parameter with gaps of its own lies dense in the flat: as a copy of it would.
        like = [torch.empty_like(p, device="meta") for p in parameters]
        return cls(
            [
                (name, tuple(p.shape), p.stride(), p.dtype, bool(flag))
                for name, p, flag in zip(names, like, penalised, strict=True)
            ]
        )

    @property
    def bytes(self) -> int:
        return sum(flat.bytes for flat in self.flats)

    def of_flat(self, flat: int) -> list[Slot]:
        return [slot for slot in self.slots if slot.flat == flat]

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Per parameter, its place in whole flats, shaped and strided like it."""
        return [slot.of(flats[slot.flat]) for slot in self.slots]

    def empty(self, device: str = "cpu") -> list[Tensor]:
        """Whole flats of zeros."""
        return [torch.zeros(flat.size, dtype=flat.dtype, device=device) for flat in self.flats]

    def digest(self) -> str:
        """The same for the same layout, anywhere."""
        plain = json.dumps(self.to_json(), separators=(",", ":"))
        return hashlib.sha256(plain.encode()).hexdigest()

    def to_json(self) -> list[Any]:
        """Plain data: [name, shape, stride, dtype, penalised] of each parameter."""
        return [
            [s.name, list(s.shape), list(s.stride), _WORDS[s.dtype], s.penalised]
            for s in self.slots
        ]

    @classmethod
    def from_json(cls, plain: Any) -> Layout:
        """The layout that a peer sent, if it is one."""
        if not isinstance(plain, list) or not 0 < len(plain) <= MOST_SLOTS:
            raise BadLayout(f"a layout must be a list of 1 to {MOST_SLOTS} parameters")
        entries = [_entry(at, row) for at, row in enumerate(plain)]
        if len({entry[0] for entry in entries}) < len(entries):
            raise BadLayout("a layout has the same name twice")
        if sum(prod(entry[1]) for entry in entries) > MOST_VALUES:
            raise BadLayout(f"a layout of more than {MOST_VALUES} values")
        return cls(entries)


def _entry(at: int, row: Any) -> _Entry:
    match row:
        case [str(name), list(shape), list(stride), str(word), bool(penalised)] if (
            0 < len(name) <= LONGEST_NAME
            and word in DTYPES
            and _are_counts(shape)
            and _are_counts(stride)
            and _is_dense(shape, stride)
        ):
            return name, tuple(shape), tuple(stride), DTYPES[word], penalised
    raise BadLayout(f"parameter {at} of a layout is not [name, shape, stride, dtype, penalised]")


def _are_counts(values: list[Any]) -> bool:
    return len(values) <= MOST_AXES and all(
        type(value) is int and 0 <= value <= MOST_VALUES for value in values
    )


def _is_dense(shape: list[int], stride: list[int]) -> bool:
    """Whether every value has a place of its own, without gaps: nothing lies outside the slot."""
    if len(shape) != len(stride):
        return False
    if prod(shape) == 0:
        return True
    axes = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1)
    innermost = not axes or axes[0][0] == 1
    return innermost and all(step == size * below for (below, size), (step, _) in pairwise(axes))


def _aligned(size: int, dtype: torch.dtype) -> int:
    line = ALIGN // dtype.itemsize
    return -(-size // line) * line
