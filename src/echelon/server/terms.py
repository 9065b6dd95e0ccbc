"""The rules of a job, as far as the gate keeps them: plain data from the trainers, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from echelon.core.config import ClipSection, ScheduleSection
from echelon.core.errors import PeerError, TrainingError
from echelon.core.interfaces import Schedule
from echelon.optim import build_schedule


@dataclass(frozen=True, slots=True)
class Terms:
    staleness: int | None
    quorum: int | None
    """Pushes that make an update; None: one of each member."""
    schedule: Schedule
    batch: int | None = None
    """Samples of an update."""
    samples: int | None = None
    """Of an epoch."""
    steps: int | None = None
    """Versions after which it is over."""
    due: tuple[int, ...] = ()
    """Every so many versions all members have to meet."""
    clip: float | None = None
    limit: float | None = None
    compensate: float = 0.0
    scaled: bool = False
    """Whether stale updates count for less."""
    balance: bool = True

    @property
    def together(self) -> bool:
        return self.quorum is None

    @property
    def by_speed(self) -> bool:
        """Whether each push is an update, and has as many samples as its trainer's speed allows."""
        return self.quorum == 1 and self.balance and self.batch is not None

    def is_over(self, version: int) -> bool:
        return self.steps is not None and version >= self.steps

    @classmethod
    def of(cls, rules: Mapping[str, Any]) -> Terms:
        quorum, staleness = rules.get("quorum", "all"), rules.get("staleness", 0)
        if quorum != "all" and not _is_count(quorum, 1):
            raise PeerError(f"a quorum of {quorum!r}: it is 'all' or at least 1")
        if staleness is not None and not _is_count(staleness, 0):
            raise PeerError(f"a staleness of {staleness!r}: it is none or at least 0")
        clip = _section(ClipSection, rules.get("clip"))
        total = rules.get("total")
        return cls(
            staleness=staleness,
            quorum=None if quorum == "all" else quorum,
            schedule=_schedule(rules.get("schedule"), total if _is_count(total, 1) else None),
            batch=_count(rules, "batch"),
            samples=_count(rules, "samples"),
            steps=_count(rules, "steps"),
            due=tuple(every for every in rules.get("due", ()) if _is_count(every, 1)),
            clip=clip.norm,
            limit=clip.value,
            compensate=float(rules.get("compensate", 0.0)),
            scaled=rules.get("scale") == "staleness",
            balance=bool(rules.get("balance", True)),
        )


def _schedule(plain: Any, total: int | None) -> Schedule:
    try:
        return build_schedule(_section(ScheduleSection, plain), total)
    except ValueError as error:
        raise TrainingError(f"the servers cannot keep to the schedule: {error}") from None


def _section(kind: Any, plain: Any) -> Any:
    try:
        return kind.model_validate(plain or {})
    except ValidationError as error:
        raise PeerError(f"rules that make no sense: {error.errors()[0]['msg']}") from None


def _count(rules: Mapping[str, Any], key: str) -> int | None:
    value = rules.get(key)
    if value is not None and not _is_count(value, 1):
        raise PeerError(f"{key} of {value!r}: it is none or at least 1")
    return value


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least
