"""What a trainer's updates cost, and what became of them."""

from __future__ import annotations

from collections import Counter

from echelon.comm.servers.outcome import Outcome

_LAST = 16
"""Staleness from here on is counted as one."""


class Tally:
    def __init__(self) -> None:
        self._fates: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self.pushed = self.pulled = 0
        """Bytes over connections that are closed."""

    def note(self, outcome: Outcome) -> None:
        self._fates[outcome.kind] += 1
        if outcome.kind == "applied":
            self._staleness[min(outcome.staleness, _LAST)] += 1

    def figures(self) -> dict[str, float]:
        found = {f"staleness_{at}": float(n) for at, n in sorted(self._staleness.items())}
        found["applied"] = float(self._fates["applied"])
        found["duplicates"] = float(self._fates["done"])
        found["refused"] = float(sum(self._fates[kind] for kind in ("late", "refused", "void")))
        return found
