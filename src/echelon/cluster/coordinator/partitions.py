"""Members that are cut off on purpose: nothing comes from them, and nothing gets to them."""

from __future__ import annotations


class Partitions:
    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def begin(self, member: int, until: float) -> None:
        self._until[member] = until

    def has(self, member: int | None, now: float) -> bool:
        return bool(self._until) and member is not None and now < self._until.get(member, now)

    def over(self, now: float) -> list[int]:
        """Those that end here."""
        found = [member for member, until in self._until.items() if now >= until]
        for member in found:
            del self._until[member]
        return found
