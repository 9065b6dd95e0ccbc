"""The group of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.core.errors import PeerError
from echelon.core.interfaces import Healing


def unwatched(_step: int, _doing: str) -> None:
    """The pulse of a member that nobody watches over."""


def unheard(_text: str) -> None:
    """Nobody is there to be told."""


class Fixed:
    """Members that are always the same."""

    elastic = False
    met = True

    def __init__(self) -> None:
        self.asked = 0
        self.pulse: Callable[[int, str], None] = unwatched
        self.watched = False
        self.tell: Callable[[str], None] = unheard

    def regroup(self, progress: Sequence[int], lost: PeerError | None) -> Healing:  # noqa: ARG002
        assert lost is not None, "nobody can join"
        raise lost

    def report(self, records: Sequence[Sequence[int]]) -> None:
        """There is no coordinator: member 0 keeps the journal."""

    def alone(self) -> None:
        """They are as they are."""

    def on_record(self, version: int) -> bool | None:  # noqa: ARG002
        """Member 0 writes the journal before it saves."""
        return True

    def rolled_back(self, version: int, why: str) -> None:
        """As above."""

    def divided(self, version: int, shares: Sequence[float]) -> None:
        """As above."""


class Alone(Fixed):
    """A member without others."""

    index = 0
    count = 1

    def close(self) -> None:
        """Nothing is open."""
