"""A set of whole numbers that is mostly made of long runs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class Intervals:
    """Half-open intervals, sorted and merged: as many numbers as you like in a few pairs.

    Growing at the end and shrinking at the front, which is what an undisturbed epoch does,
    takes the same short time whatever the set holds.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in pairs:
            self.add(start, stop)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Intervals({list(self)})"

    @property
    def total(self) -> int:
        """How many numbers there are."""
        return sum(self._stops) - sum(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Put in [start, stop), which is not empty; what is there already stays."""
        stops = self._stops
        if stops and start == stops[-1]:
            stops[-1] = stop
        elif not stops or start > stops[-1]:
            self._starts.append(start)
            stops.append(stop)
        else:
            # Every interval that overlaps or touches the new one becomes part of it.
            low, high = bisect_left(stops, start), bisect_right(self._starts, stop)
            if low < high:
                start, stop = min(start, self._starts[low]), max(stop, stops[high - 1])
            self._starts[low:high] = [start]
            stops[low:high] = [stop]

    def pop(self, size: int) -> tuple[int, int]:
        """Take out the first interval, or at most its first `size` numbers."""
        start, end = self._starts[0], self._stops[0]
        stop = start + size
        if stop < end:
            self._starts[0] = stop
            return start, stop
        del self._starts[0], self._stops[0]
        return start, end

    def take(self, start: int, stop: int) -> bool:
        """Take out [start, stop) if all of it is there; if not, change nothing and say so."""
        starts, stops = self._starts, self._stops
        if starts and start == starts[0] and stop <= stops[0]:
            if stop < stops[0]:
                starts[0] = stop
            else:
                del starts[0], stops[0]
            return True
        if self.overlap(start, stop) < stop - start:
            return False
        self.remove(start, stop)
        return True

    def remove(self, start: int, stop: int) -> None:
        """Take out whatever of [start, stop) is there."""
        low, high = self._touched(start, stop)
        if low == high:
            return
        kept = [(self._starts[low], start), (stop, self._stops[high - 1])]
        kept = [(first, last) for first, last in kept if first < last]
        self._starts[low:high] = [first for first, _ in kept]
        self._stops[low:high] = [last for _, last in kept]

    def common(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are there."""
        low, high = self._touched(start, stop)
        return [
            (max(start, first), min(stop, last))
            for first, last in zip(self._starts[low:high], self._stops[low:high], strict=True)
        ]

    def overlap(self, start: int, stop: int) -> int:
        """How many numbers of [start, stop) are there."""
        return sum(last - first for first, last in self.common(start, stop))

    def clear(self) -> None:
        self._starts.clear()
        self._stops.clear()

    def _touched(self, start: int, stop: int) -> tuple[int, int]:
        """Which intervals share a number with [start, stop)."""
        return bisect_right(self._stops, start), bisect_left(self._starts, stop)
