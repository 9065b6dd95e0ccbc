"""The output of the pure coordinator: what to journal, send and close; and its settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echelon.cluster.coordinator.protocol import encode

SYNCED = {"generation", "rolled_back", "finished"}
"""Entries after which the journal is synced to disk. The others may stay in the kernel's memory,
which outlives the coordinator's process."""


@dataclass(slots=True)
class Outbox:
    """What follows from an event. The server first writes the notes, then sends the mail, then
    closes the connections of `farewells`.

    In this order a successor of the coordinator knows everything that a member was sent.
    """

    notes: deque[tuple[str, dict[str, Any]]] = field(default_factory=deque)
    mail: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    """(member id, frame in parts); large parts are shared by many frames."""
    farewells: list[int] = field(default_factory=list)

    def note(self, kind: str, **fields: Any) -> None:
        """Add an entry for the journal."""
        self.notes.append((kind, fields))

    def send(self, to: int, kind: str, **fields: Any) -> None:
        self.mail.append((to, (encode(kind, **fields),)))

    def hang_up(self, member: int) -> None:
        self.farewells.append(member)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one run."""

    key: bytes
    """32 bytes that every process that may take part knows."""
    expected: int
    """Members started together, numbered from 0: the first generation waits for all of them."""
    min_workers: int
    """The smallest generation that may train."""
    wait: float
    """Seconds to wait for more members when there are fewer than that."""
    samples: int
    """Samples per epoch."""
    run: Mapping[str, Any]
    """Sent to every member in its welcome: plain JSON data that the coordinator does not use."""


# How patient the coordinator is. All times in seconds.

START = 60.0
"""For the members started together to say hello; `Settings.wait` if that is longer."""
LATE = 5.0
"""For a member to leave its generation; LATE_STEPS times the longest step if that is longer."""
LATE_STEPS = 4.0
BUSY_LATE = 30.0
"""For a member that is computing to leave its generation: it may be unable to interrupt that."""
QUIET = 1.5
"""Without a heartbeat; QUIET_GAPS times the usual gap between two if that is longer."""
QUIET_GAPS = 6.0
PATIENCE = 30.0
"""Without a heartbeat from a process that computes: one long call may hold up its heartbeats."""
RECONNECT = 2.0
"""For a member whose connection broke to connect again."""
RETURN = 5.0
"""The same after a restart of the coordinator."""
FAREWELL = 5.0
"""For members to leave once the run has ended."""
BARREN = 10
"""Generations in a row without an update after which the run fails."""
STALL = 1.0
"""Without an update before a stall is reported; STALL_STEPS times the usual time if longer."""
STALL_STEPS = 4.0
STALL_UNKNOWN = 10.0
"""The same if no usual time is known, or if no single member is to blame."""
