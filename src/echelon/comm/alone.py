"""The group of one."""

from __future__ import annotations

from collections.abc import Callable


def unwatched(_step: int, _doing: str) -> None:
    """The pulse of a member that nobody watches over."""


class Alone:
    """A member without others."""

    index = 0
    count = 1

    def __init__(self) -> None:
        self.asked = 0
        self.pulse: Callable[[int, str], None] = unwatched
        self.watched = False

    def close(self) -> None:
        """Nothing is open."""
