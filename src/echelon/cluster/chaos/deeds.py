"""What was done to a run, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echelon.cluster.chaos.plan import Fault


@dataclass(slots=True)
class Deed:
    """A fault that happened, or the reason why not."""

    fault: Fault
    version: int = 0
    """The last one on record when it happened."""
    moment: float = 0.0
    """Unix time."""
    skipped: str | None = None
    """Why it did not happen."""
    members: list[int] = field(default_factory=list)
    """Whom it hit; of a join, who came."""
    pids: list[int] = field(default_factory=list)
    coordinator: bool = False
    server: int | None = None
    """Which of a parameter server's."""
    detected: float | None = None
    """Seconds until it was noticed; None if it never was."""
    recovered: float | None = None
    """Seconds until the first update after it had been dealt with."""
    lost_steps: int = 0
    note: str = ""
    problem: str | None = None
    """What should not have come of it."""

    @property
    def who(self) -> str:
        if self.coordinator:
            return "coordinator"
        if self.server is not None:
            return f"server {self.server}"
        return ", ".join(f"member {member}" for member in self.members)

    def as_data(self) -> dict[str, Any]:
        return {
            "fault": str(self.fault),
            "version": self.version,
            "skipped": self.skipped,
            "members": self.members,
            "detected_s": _rounded(self.detected),
            "recovered_s": _rounded(self.recovered),
            "steps_lost": self.lost_steps,
            "note": self.note,
            "problem": self.problem,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
