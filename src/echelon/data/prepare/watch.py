"""How preparing data is told to those who watch."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Sees the work go by; its faults would be the caller's."""

    def began(self, what: str, total: int | None, /) -> None:
        """A part of the work begins; `total` steps, where that is known."""
        ...

    def advanced(self, done: int, /) -> None:
        """So many steps of it are done."""
        ...

    def ended(self) -> None:
        """All is over, well or not."""
        ...


class Unwatched:
    """Nobody is told."""

    def began(self, what: str, total: int | None) -> None:
        """Nothing to tell."""

    def advanced(self, done: int) -> None:
        """Nothing to tell."""

    def ended(self) -> None:
        """Nothing to tell."""
