"""What a journal comes to: epochs, members, failures and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class EpochAccount:
    """One epoch: `once`, `left_out`, `twice` and `never` add up to `samples`."""

    epoch: int
    samples: int
    once: int
    left_out: int
    """Consumed without an update, because theirs was not finite."""
    twice: int
    never: int
    first: int | None
    last: int | None
    """The versions that consumed something of it; None if nothing but what was left out."""
    finished: bool
    """Nothing is left, or a later epoch has begun."""
    members: dict[int, int]
    """Samples processed by each; members that hold parts of one model count the same ones."""
    twice_at: list[tuple[int, int]]
    never_at: list[tuple[int, int]]

    @property
    def exact(self) -> bool:
        """Nothing twice, and nothing forgotten."""
        return not self.twice and not (self.finished and self.never)


class Happening(NamedTuple):
    """Something that was no update, and what it cost if that is known."""

    kind: str
    time: float
    version: int
    """The last one on record at that time."""
    member: int | None
    text: str
    seconds: float | None = None
    """Until the next update was made; of a rollback, until all that it undid was made again."""
    lost_steps: int | None = None


@dataclass(slots=True)
class Account:
    """All that a journal says about one run."""

    run: str
    samples: int
    batch_size: int
    version: int
    status: str | None
    """How it ended; None if it is under way, or was killed."""
    taken_over: int
    """The version up to which there was no journal and a checkpoint was believed."""
    epochs: list[EpochAccount]
    generations: int
    happenings: list[Happening]
    problems: list[str] = field(default_factory=list)

    @property
    def failures(self) -> Sequence[Happening]:
        return [h for h in self.happenings if h.kind in ("lost", "coordinator", "rolled_back")]

    @property
    def members(self) -> dict[int, int]:
        """Samples processed by each in all."""
        total: dict[int, int] = {}
        for epoch in self.epochs:
            for member, count in epoch.members.items():
                total[member] = total.get(member, 0) + count
        return dict(sorted(total.items()))

    def as_data(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {
            "run": self.run,
            "exactly_once": not self.problems,
            "problems": self.problems,
            "status": self.status,
            "samples": self.samples,
            "batch_size": self.batch_size,
            "version": self.version,
            "taken_over": self.taken_over,
            "generations": self.generations,
            "members": {str(member): count for member, count in self.members.items()},
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "happenings": [happening._asdict() for happening in self.happenings],
        }
