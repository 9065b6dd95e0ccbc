"""What follows from an event, in the order in which it has to happen."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from echelon.cluster.coordinator.frames import encode

SYNCED = {"generation", "rolled_back", "finished", "told"}
"""Entries after which the journal is brought to disk; for the others the kernel's memory will do:
it survives the coordinator."""


@dataclass(slots=True)
class Outbox:
    """First everything is written down, then it is sent, then connections are closed.

    So what a member was told is known to the coordinator's successor.
    """

    notes: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    mail: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    """Frames in parts, some of which many share."""
    farewells: list[int] = field(default_factory=list)

    def note(self, kind: str, **fields: Any) -> None:
        """An entry for the journal."""
        self.notes.append((kind, fields))

    def send(self, to: int, kind: str, **fields: Any) -> None:
        self.mail.append((to, (encode(kind, **fields),)))

    def hang_up(self, member: int) -> None:
        self.farewells.append(member)
