"""What the pure coordinator wants done; its settings."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echelon.cluster.coordinator.protocol import encode

# --- outbox ---
# What follows from an event, in the order in which it has to happen.

SYNCED = {"generation", "rolled_back", "finished"}
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


# --- settings ---
# What a coordinator is told when it starts, and how patient it is.


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one run."""

    key: bytes
    """32 bytes that everybody who may take part knows."""
    expected: int
    """How many are started together, numbered from 0: the first generation waits for them."""
    min_workers: int
    """With fewer than that nobody goes on."""
    wait: float
    """Seconds in which more have to come where there are fewer."""
    samples: int
    """Of an epoch."""
    run: Mapping[str, Any]
    """Given to everybody who is welcomed: plain JSON data, of no meaning to the coordinator."""


START = 60.0
"""Seconds in which those started together have said hello; `wait` if that is longer."""
LATE = 5.0
"""Seconds to leave a generation in, or 4 × the longest step."""
LATE_STEPS = 4.0
BUSY_LATE = 30.0
"""The same for one that is computing: what it does may not be such as can be left off."""
QUIET = 1.5
"""Seconds without a sign of life, or 6 × the usual time between two."""
QUIET_GAPS = 6.0
PATIENCE = 30.0
"""Seconds for one that gives no sign of life but computes: one long call may hold up its beats."""
RECONNECT = 2.0
"""Seconds in which a broken connection has come back."""
RETURN = 5.0
"""The same after the coordinator's own restart."""
FAREWELL = 5.0
"""Seconds to leave in once the run has ended."""
BARREN = 10
"""Generations in a row without an update after which it is no use to try again."""
STALL = 1.0
"""Seconds without an update worth a word, or 4 × the usual time between two."""
STALL_STEPS = 4.0
STALL_UNKNOWN = 10.0
"""Seconds where no usual time is known, or where nobody in particular is awaited."""
