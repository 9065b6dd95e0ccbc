"""What one shard gets of a push, cut into chunks that leave as soon as they are complete.

Backward is done with the last layers first, so their chunks come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.comm.servers.messages import CHUNK, Chunk
from echelon.comm.servers.partition import Partition


@dataclass(frozen=True, slots=True)
class Cutting:
    """A shard's chunks, and which of them a parameter has a part in."""

    chunks: tuple[Chunk, ...]
    of_parameter: tuple[tuple[int, ...], ...]
    parameters: tuple[int, ...]
    """Per chunk, how many parameters have a part in it."""

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
        return cls(tuple(chunks), tuple(reversed(of_parameter)), tuple(held))


class Progress:
    """Which chunks of one push are complete, and which have left."""

    def __init__(self, cutting: Cutting) -> None:
        self._cutting = cutting
        self.begin()

    def begin(self) -> None:
        self._lacking = list(self._cutting.parameters)
        self._left = bytearray(len(self._lacking))

    def ready(self, at: int) -> list[Chunk]:
        """Parameter `at` is final: the chunks that are complete by it, which now leave."""
        found = []
        for number in self._cutting.of_parameter[at]:
            self._lacking[number] -= 1
            if self._lacking[number] == 0:
                self._left[number] = 1
                found.append(self._cutting.chunks[number])
        return found

    def rest(self) -> Sequence[Chunk]:
        """All that has not left yet."""
        if not any(self._left):
            return self._cutting.chunks
        pairs = zip(self._cutting.chunks, self._left, strict=True)
        return [chunk for chunk, left in pairs if not left]
