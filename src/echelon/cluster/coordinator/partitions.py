"""Members that are cut off on purpose: nothing comes from them, and nothing gets to them."""

from __future__ import annotations


class Partitions:
    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def begin(self, member: int, until: float) -> None:
        self._until[member] = until

    def has(self, member: int | None) -> bool:
        """Until `over` has told of its end, so that nothing gets through before what was missed."""
        return member in self._until

    def over(self, now: float) -> list[int]:
        """Those that end here."""
        found = [member for member, until in self._until.items() if now >= until]
        for member in found:
            del self._until[member]
        return found
