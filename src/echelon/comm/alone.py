"""The group of one."""

from __future__ import annotations


class Alone:
    """A member without others."""

    index = 0
    count = 1

    def __init__(self) -> None:
        self.asked = 0

    def close(self) -> None:
        """Nothing is open."""
