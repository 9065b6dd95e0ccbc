"""What one shard gets of a push, cut into chunks that leave as soon as they are complete.

Backward is done with the last layers first, so their chunks come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from echelon.comm.servers.messages import CHUNK, Chunk
from echelon.comm.servers.partition import Partition

GAP = -1
"""Stands for no parameter: what lies between two of them."""


class Stretch(NamedTuple):
    """A part of a chunk that belongs to one parameter, or to none."""

    parameter: int
    start: int
    """Where it begins among the parameter's values; of a gap, among the range's."""
    size: int


@dataclass(frozen=True, slots=True)
class Cutting:
    """A shard's chunks, and which of them a parameter has a part in."""

    chunks: tuple[Chunk, ...]
    of_parameter: tuple[tuple[int, ...], ...]
    parameters: tuple[int, ...]
    """Per chunk, how many parameters have a part in it."""
    stretches: tuple[tuple[Stretch, ...], ...]
    """Per chunk, whose values it is made of, one behind the other."""

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
    """Which chunks of one push are complete, and which have left."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self.begin()

    def begin(self) -> None:
        self._lacking = list(self._cutting.parameters)
        self._left = bytearray(len(self._lacking))

    def ready(self, at: int) -> list[int]:
        """Parameter `at` is final: the chunks that are complete by it, which now leave."""
        found = []
        for number in self._cutting.of_parameter[at]:
            self._lacking[number] -= 1
            if self._lacking[number] == 0:
                self._left[number] = 1
                found.append(number)
        return found

    def rest(self) -> Sequence[int]:
        """All that has not left yet."""
        return [number for number, left in enumerate(self._left) if not left]
