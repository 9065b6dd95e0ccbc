"""Whoever takes down what is committed."""

from __future__ import annotations

from typing import Protocol


class Recording(Protocol):
    """Takes down what is committed."""

    def tick(self) -> None:
        """Called often; writes seldom."""
        ...

    def keep(self) -> None:
        """Before what is committed becomes part of a checkpoint."""
        ...
