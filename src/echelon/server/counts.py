"""What became of each member's pushes, in numbers."""

from __future__ import annotations

from collections import Counter


class Counts:
    def __init__(self) -> None:
        self._fates: dict[int, Counter[str]] = {}
        self._ages: dict[int, Counter[int]] = {}

    def note(self, member: int, fate: str, staleness: int = 0) -> None:
        self._fates.setdefault(member, Counter())[fate] += 1
        if fate == "applied":
            self._ages.setdefault(member, Counter())[staleness] += 1

    def figures(self) -> dict[str, dict[str, float]]:
        """By member: applied, done (again), late, refused, void; staleness_0, staleness_1, …"""
        found: dict[str, dict[str, float]] = {}
        for member, fates in sorted(self._fates.items()):
            ages = self._ages.get(member, Counter())
            found[str(member)] = {**fates, **{f"staleness_{n}": ages[n] for n in sorted(ages)}}
        return found
