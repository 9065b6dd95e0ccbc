"""Where each parameter lies: in which flat, on which shard, in which chunk of a push.

`Layout` puts parameters into flats, one for each dtype and penalty, in the model's order:

    flat 0, float32, penalised   │ 0.weight         │ 2.weight   │ 4.weight │
    flat 1, float32              │ 0.bias │ 2.bias │ 4.bias │

Every slot begins at a cache line, so there are small gaps. They hold zeros, in gradients too.

`Partition` divides the flats over shards in even shares of bytes, which cuts large tensors up:

    flats     │ 0 · · · · · · · · · · · · · · │ 1 · · · │
    shards    │ 0           │ 1               │         │      cut at cache lines

`Cutting` cuts one shard's part of a push into chunks, which leave as soon as they are complete.
Backward finishes the last layers first, so their chunks come first. `Progress` counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.comm.ps.messages import CHUNK, Chunk
from echelon.core.errors import PeerError

ALIGN = 64
"""Bytes of a cache line."""
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
# Limits of a layout that comes from a peer.
MOST_SLOTS, LONGEST_NAME, MOST_AXES, MOST_VALUES = 1 << 20, 1024, 16, 1 << 42
GAP = -1
"""The "parameter" of a stretch between two parameters."""

_Entry = tuple[str, tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Name, shape, stride, dtype, penalised."""


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
        # A parameter with gaps of its own lies dense in the flat, as a copy of it would.
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

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return each parameter's place in whole flats, shaped and strided like the parameter."""
        return [slot.of(flats[slot.flat]) for slot in self.slots]

    def empty(self, device: str = "cpu") -> list[Tensor]:
        """Return whole flats of zeros."""
        return [torch.zeros(flat.size, dtype=flat.dtype, device=device) for flat in self.flats]

    def digest(self) -> str:
        """Return a hash, the same for the same layout on every machine."""
        plain = json.dumps(self.to_json(), separators=(",", ":"))
        return hashlib.sha256(plain.encode()).hexdigest()

    def to_json(self) -> list[Any]:
        """Return plain data: [name, shape, stride, dtype, penalised] of each parameter."""
        return [
            [s.name, list(s.shape), list(s.stride), _WORDS[s.dtype], s.penalised]
            for s in self.slots
        ]

    @classmethod
    def from_json(cls, plain: Any) -> Layout:
        """Return the layout that a peer sent; BadLayout if it is none."""
        if not isinstance(plain, list) or not 0 < len(plain) <= MOST_SLOTS:
            raise BadLayout(f"a layout must be a list of 1 to {MOST_SLOTS} parameters")
        entries = [_entry(at, row) for at, row in enumerate(plain)]
        if len({entry[0] for entry in entries}) < len(entries):
            raise BadLayout("a layout has the same name twice")
        if sum(prod(entry[1]) for entry in entries) > MOST_VALUES:
            raise BadLayout(f"a layout of more than {MOST_VALUES} values")
        return cls(entries)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a flat: `size` values from `start` on, strided as in the model."""

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
        """Return this parameter's place in its flat, shaped."""
        return self.shaped(flat[self.start : self.stop])

    def shaped(self, values: Tensor) -> Tensor:
        """Return a row of this parameter's values as a view with the parameter's shape."""
        return values.as_strided(self.shape, self.stride, values.storage_offset())


@dataclass(frozen=True, slots=True)
class Flat:
    dtype: torch.dtype
    penalised: bool
    size: int

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


class Room:
    """Memory for one value per parameter: whole flats, and each parameter's view of them.

    `memory` is the bytes of all flats, one behind the other, each a whole number of cache lines.
    """

    def __init__(self, layout: Layout, memory: Tensor | None = None) -> None:
        if memory is None:
            memory = torch.empty(layout.bytes, dtype=torch.uint8)
        assert memory.numel() >= layout.bytes, f"{memory.numel()} bytes of {layout.bytes}"
        self.memory = memory
        self.flats: list[Tensor] = []
        start = 0
        for flat in layout.flats:
            self.flats.append(memory[start : start + flat.bytes].view(flat.dtype))
            start += flat.bytes
        self.views = layout.views(self.flats)

    def clear(self) -> None:
        """Write zeros. This also touches every page: a first touch costs more than a copy."""
        self.memory.zero_()


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
    """Return whether the values have distinct places without gaps, all inside the slot."""
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


class BadLayout(PeerError):
    """A layout that came from a peer is invalid."""


class Partition:
    """The flats of a layout, divided over shards. With a small model some shards hold nothing."""

    def __init__(self, layout: Layout, shards: int) -> None:
        assert shards > 0, f"{shards} shards"
        self.layout = layout
        self.shards = shards
        lines = layout.bytes // ALIGN
        cuts = [lines * shard // shards * ALIGN for shard in range(shards + 1)]
        self._ranges = [list(_between(layout, *pair)) for pair in pairwise(cuts)]
        self._pieces = [list(self._cut(slot)) for slot in layout.slots]

    def ranges(self, shard: int) -> list[Range]:
        return self._ranges[shard]

    def dtypes(self, shard: int) -> list[torch.dtype]:
        return [self.layout.flats[r.flat].dtype for r in self._ranges[shard]]

    def pieces(self, at: int) -> list[Piece]:
        """Return where parameter `at` lies: one piece, unless it is cut up."""
        return self._pieces[at]

    def bytes(self, shard: int) -> int:
        """Return the bytes of one copy of the shard's ranges."""
        flats = self.layout.flats
        return sum(r.size * flats[r.flat].dtype.itemsize for r in self._ranges[shard])

    def empty(self, shard: int) -> list[Tensor]:
        """Return new memory for the shard's ranges, not filled."""
        return self.carve(shard, torch.empty(self.bytes(shard), dtype=torch.uint8))

    def carve(self, shard: int, memory: Tensor) -> list[Tensor]:
        """Divide bytes of memory among the shard's ranges, one behind the other."""
        found, start = [], 0
        for held, dtype in zip(self._ranges[shard], self.dtypes(shard), strict=True):
            stop = start + held.size * dtype.itemsize
            found.append(memory[start:stop].view(dtype))
            start = stop
        return found

    def cut(self, shard: int, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return the shard's ranges of whole flats."""
        return [flats[r.flat][r.start : r.stop] for r in self._ranges[shard]]

    def _cut(self, slot: Slot) -> Iterator[Piece]:
        for shard, ranges in enumerate(self._ranges):
            for at, held in enumerate(ranges):
                start, stop = max(slot.start, held.start), min(slot.stop, held.stop)
                if held.flat == slot.flat and start < stop:
                    yield Piece(shard, at, start - held.start, start - slot.start, stop - start)


@dataclass(frozen=True, slots=True)
class Range:
    """Values [start, stop) of a flat."""

    flat: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that one shard holds."""

    shard: int
    range: int
    """Number of the shard's range that holds it."""
    offset: int
    """Where it begins in that range."""
    start: int
    """Where it begins among the parameter's own values, in memory order."""
    size: int


def _between(layout: Layout, first: int, last: int) -> Iterator[Range]:
    """Yield the ranges in bytes [first, last) of all flats, one behind the other."""
    begin = 0
    for at, flat in enumerate(layout.flats):
        low, high = max(first, begin), min(last, begin + flat.bytes)
        if low < high:
            size = flat.dtype.itemsize
            yield Range(at, (low - begin) // size, (high - begin) // size)
        begin += flat.bytes


@dataclass(frozen=True, slots=True)
class Cutting:
    """A shard's chunks, and the parameters that have a part in each."""

    chunks: tuple[Chunk, ...]
    of_parameter: tuple[tuple[int, ...], ...]
    """Per parameter, the chunks that it has a part in."""
    parameters: tuple[int, ...]
    """Per chunk, how many parameters have a part in it."""
    stretches: tuple[tuple[Stretch, ...], ...]
    """Per chunk, the stretches of parameters and gaps that it consists of, in order."""

    @classmethod
    def of(cls, partition: Partition, shard: int) -> Cutting:
        steps = [CHUNK // dtype.itemsize for dtype in partition.dtypes(shard)]
        numbers: dict[tuple[int, int], int] = {}
        chunks: list[Chunk] = []
        of_parameter: list[tuple[int, ...]] = []
        held: list[int] = []
        for at in reversed(range(len(partition.layout.slots))):
            found = []
            for piece in partition.pieces(at):
                if piece.shard != shard:
                    continue
                step, size = steps[piece.range], partition.ranges(shard)[piece.range].size
                last = (piece.offset + piece.size - 1) // step
                for part in range(last, piece.offset // step - 1, -1):
                    number = numbers.setdefault((piece.range, part), len(chunks))
                    if number == len(chunks):
                        start = part * step
                        chunks.append(Chunk(piece.range, start, min(start + step, size)))
                        held.append(0)
                    held[number] += 1
                    found.append(number)
            of_parameter.append(tuple(found))
        stretches = tuple(tuple(_stretches(partition, shard, chunk)) for chunk in chunks)
        return cls(tuple(chunks), tuple(reversed(of_parameter)), tuple(held), stretches)


class Stretch(NamedTuple):
    """A part of a chunk that belongs to one parameter, or to a gap."""

    parameter: int
    start: int
    """Where it begins among the parameter's values, or, for a gap, among the range's."""
    size: int


def _stretches(partition: Partition, shard: int, chunk: Chunk) -> Iterator[Stretch]:
    place = chunk.start
    for at in range(len(partition.layout.slots)):  # in the order in which they lie
        for piece in partition.pieces(at):
            start = max(piece.offset, chunk.start)
            stop = min(piece.offset + piece.size, chunk.stop)
            if (piece.shard, piece.range) != (shard, chunk.range) or start >= stop:
                continue
            if place < start:
                yield Stretch(GAP, place, start - place)
            yield Stretch(at, start - piece.offset + piece.start, stop - start)
            place = stop
    if place < chunk.stop:
        yield Stretch(GAP, place, chunk.stop - place)


class Progress:
    """Which chunks of one push are complete, and which have been sent."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self.begin()

    def begin(self) -> None:
        self._lacking = list(self._cutting.parameters)
        self._left = bytearray(len(self._lacking))

    def ready(self, at: int) -> list[int]:
        """Note that parameter `at` is final; return the chunks that this completes, to be sent."""
        found = []
        for number in self._cutting.of_parameter[at]:
            self._lacking[number] -= 1
            if self._lacking[number] == 0:
                self._left[number] = 1
                found.append(number)
        return found

    def rest(self) -> Sequence[int]:
        """Return the chunks that have not been sent yet."""
        return [number for number, left in enumerate(self._left) if not left]
