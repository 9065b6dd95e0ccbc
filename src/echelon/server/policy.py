"""Sync / quorum / bounded / async rules; trainer states.

The dial: which pushes make an update, and who may begin the next batch.

together  one push of every member, all on the same weights
quorum    the first q that are not too old; nobody waits for the others, who come too late
each      every push is an update; the fast are held back so that no push gets too old
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from echelon.core.config import ClipSection, ScheduleSection
from echelon.core.errors import PeerError, TrainingError
from echelon.core.interfaces import Schedule
from echelon.core.types import Lease
from echelon.optim import build_schedule
from echelon.server.accounting import Applied
from echelon.server.decisions import Push, Round

# --- ways ---


class Way(ABC):
    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness

    @abstractmethod
    def chosen(self, roll: Roll, version: int) -> list[int]:
        """Whose pushes make the next version; empty if there is nothing to be done yet."""

    def may_begin(self, roll: Roll, member: int) -> bool:  # noqa: ARG002
        """Whether it may have the weights for its next batch."""
        return True

    def share(self, members: int, batch: int) -> float:  # noqa: ARG002
        """Samples of a push, where speeds do not matter."""
        return float(batch)

    def admits(self, roll: Roll, member: int, based_on: int, version: int) -> bool:  # noqa: ARG002
        """Whether a push is not too old, and will not be."""
        return self._staleness is None or version - based_on <= self._staleness


class Together(Way):
    def chosen(self, roll: Roll, version: int) -> list[int]:  # noqa: ARG002
        return sorted(roll.members) if roll.waiting.keys() >= roll.members else []

    def share(self, members: int, batch: int) -> float:  # noqa: ARG002
        return 0.0


class Quorum(Way):
    def __init__(self, staleness: int | None, quorum: int) -> None:
        super().__init__(staleness)
        self._quorum = quorum

    def chosen(self, roll: Roll, version: int) -> list[int]:  # noqa: ARG002
        need = min(self._quorum, len(roll.members))
        here = list(roll.waiting)
        # At the end of an epoch, or before a meeting, there may be nobody left to wait for.
        enough = len(here) >= need or not roll.busy(but=here)
        return here[:need] if here and enough else []

    def share(self, members: int, batch: int) -> float:
        return max(1.0, batch / min(self._quorum, members or 1))


class Each(Way):
    """Those under way, the oldest first, have weights v₁ ≤ v₂ ≤ …; always V + m − 1 ≤ v_m + s.

    So even if those before it are applied first, number m is applied to weights that are at most s
    newer than its own. The oldest can always be applied: nobody waits for ever.
    """

    def admits(self, roll: Roll, member: int, based_on: int, version: int) -> bool:
        """One that was given up in between may come back when others have taken its place."""
        return self._holds({**roll.versions, member: based_on}.values(), version)

    def chosen(self, roll: Roll, version: int) -> list[int]:
        for member in sorted(roll.waiting, key=roll.versions.__getitem__):
            others = (v for who, v in roll.versions.items() if who != member)
            if self._holds(others, version + 1):
                return [member]
        return []

    def may_begin(self, roll: Roll, member: int) -> bool:
        others = len(roll.versions.keys() - {member})
        return self._staleness is None or others <= self._staleness

    def _holds(self, versions: Iterable[int], newest: int) -> bool:
        s = self._staleness
        return s is None or all(newest + m <= v + s for m, v in enumerate(sorted(versions)))


def way_of(terms: Terms) -> Way:
    if terms.quorum is None:
        return Together(terms.staleness)
    if terms.quorum == 1:
        return Each(terms.staleness)
    return Quorum(terms.staleness, terms.quorum)


# --- examine ---
# Whether a push may take part in an update.

Verdict = tuple[str, int, str]
"""(fate, staleness, reason)"""


class Examiner:
    def __init__(self, terms: Terms, way: Way, parameters: int) -> None:
        self._terms, self._way, self._parameters = terms, way, parameters

    def examine(
        self, member: int, push: Push, version: int, roll: Roll, applied: Applied
    ) -> Verdict | None:
        """What becomes of it at once; None if it may be applied."""
        lease, age = push.lease, version - push.based_on
        if applied.was(member, push.seq) is not None:
            return "done", 0, "it is sent again"
        if age < 0 or not self._makes_sense(push) or not applied.makes_sense(lease):
            return "void", 0, f"a push of {lease}, based on {push.based_on} at version {version}"
        done = applied.done(lease)
        if done and done == lease.size:
            return "done", 0, f"samples {_span(lease)} are applied already"
        if reason := self._overlap(member, lease, roll, applied):
            return "late", age, reason
        if not self._terms.together and self._terms.is_over(version):
            return "late", age, "all steps are done"
        if not self._way.admits(roll, member, push.based_on, version):
            return "late", age, f"{age} updates were made since version {push.based_on}"
        if not self._terms.together and (reason := self.fault([(member, push)])):
            return "refused", age, reason
        return None

    def _makes_sense(self, push: Push) -> bool:
        """All of it comes from a peer."""
        head = push.head
        known = all(at < self._parameters for at in head.missing) if self._parameters else True
        return push.makes_sense and known and not head.square < 0

    def _overlap(self, member: int, lease: Lease, roll: Roll, applied: Applied) -> str | None:
        """Samples that are applied already, or about to be: none may count twice."""
        if parts := applied.parts(lease):
            words = ", ".join(f"[{start}, {stop})" for start, stop in parts)
            return f"of samples {_span(lease)}, {words} are applied already"
        for other, push in roll.waiting.items():
            theirs = push.lease
            if other != member and theirs.epoch == lease.epoch and _overlap(theirs, lease):
                return f"samples {_span(theirs)} of member {other} are about to be applied"
        return None

    def fault(self, pushes: Sequence[tuple[int, Push]]) -> str | None:
        """Why these pushes cannot make an update."""
        for member, push in pushes:
            if not push.finite:
                return f"the gradient of member {member} is not finite"
        if sum(push.row.divisor for _, push in pushes) <= 0:
            return "the loss gave its batch a weight of 0"
        missing = frozenset.intersection(*(push.missing for _, push in pushes))
        if self._parameters and len(missing) >= self._parameters:
            return "no parameter got a gradient"
        return None


def _overlap(one: Lease, other: Lease) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _span(lease: Lease) -> str:
    return f"[{lease.start}, {lease.stop}) of epoch {lease.epoch}"


# --- terms ---
# The rules of a job, as far as the gate keeps them: plain data from the trainers, checked.


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


# --- rates ---
# What an update counts for: the schedule, the size of a push, its age.


def round_of(
    terms: Terms,
    version: int,
    pushes: Sequence[tuple[int, Push]],
    weight: float = 1.0,
    members: int = 1,
) -> Round:
    """The round that makes `version` + 1 of these pushes, and counts for `weight`; they are of one
    or some of so many `members`."""
    divisors = [push.row.divisor for _, push in pushes]
    ages = [version - push.based_on for _, push in pushes]
    first = pushes[0][1]
    factor = weight * _factor(terms, version, sum(ages) / len(ages))
    if terms.by_speed and members > 1:  # the batches of one alone are as they are everywhere
        factor *= _length(terms, first)
    return Round(
        version=version + 1,
        pushes=tuple((member, push.seq) for member, push in pushes),
        divisor=sum(divisors),
        factor=factor,
        square=first.head.square if len(pushes) == 1 else None,
        clip=terms.clip,
        limit=terms.limit,
        missing=frozenset.intersection(*(push.missing for _, push in pushes)),
        strengths=_strengths(terms.compensate, divisors, ages),
    )


def _length(terms: Terms, push: Push) -> float:
    """A push with more samples is a longer step."""
    assert terms.batch is not None
    return push.lease.size / terms.batch


def _factor(terms: Terms, version: int, age: float) -> float:
    factor = terms.schedule.factor(version)
    return factor / (1 + age) if terms.scaled else factor


def _strengths(
    compensate: float, divisors: Sequence[float], ages: Sequence[int]
) -> tuple[float, ...]:
    """A push's part of the mean is its gradient times its share; its square is too small."""
    if not compensate or not any(ages):
        return ()
    total = sum(divisors)
    return tuple(
        compensate * total / divisor if age else 0.0
        for divisor, age in zip(divisors, ages, strict=True)
    )


# --- roll ---
# Who has weights of which version, and who is not at work.
#
# coming ─ begins ─▶ at work (weights of v) ─ push ─▶ waiting ─ applied ─▶ (owed weights) ─▶ at
# work    ▲                     └───────────── rests, meets ─────────────▶ away ─┘


class Roll:
    """The members of one generation."""

    def __init__(self, members: Iterable[int] = ()) -> None:
        self.members = set(members)
        self.away: set[int] = set()
        """Those who will not push before they ask for weights again."""
        self._idle: set[int] = set()
        """Of these, who has nothing to push, and does not only look about in a meeting."""
        self.versions: dict[int, int] = {}
        """The weights of those whose gradient is under way, or waits to be applied."""
        self.waiting: dict[int, Push] = {}
        """Pushes that wait to be applied, in the order they came."""

    def begin(self, member: int, version: int) -> None:
        """It has these weights, and computes."""
        self.away.discard(member)
        self._idle.discard(member)
        self.waiting.pop(member, None)
        self.versions[member] = version

    def state_dict(self) -> dict[str, Any]:
        """For a gate that takes over: pushes that wait are sent again, so it waits for them."""
        return {
            "members": sorted(self.members),
            "work": [[member, version] for member, version in self.versions.items()],
            "away": sorted(self.away),
            "idle": sorted(self._idle),
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Roll:
        roll = cls(state["members"])
        roll.versions = dict(state["work"])
        roll.away, roll._idle = set(state["away"]), set(state["idle"])
        return roll

    def wait(self, member: int, push: Push) -> None:
        self.begin(member, push.based_on)
        self.waiting[member] = push

    def settled(self, member: int) -> None:
        """Its gradient is applied, or nothing will come of it."""
        self.waiting.pop(member, None)
        self.versions.pop(member, None)

    def ask_again(self, member: int) -> None:
        """A push that waits comes once more; the weights it was made with are the same."""
        self.waiting.pop(member, None)

    def rest(self, member: int, *, meets: bool = False) -> None:
        self.settled(member)
        self.away.add(member)
        (self._idle.discard if meets else self._idle.add)(member)

    def come_back(self) -> None:
        """A meeting is over: everybody is expected but those who found nothing to do after it."""
        self.away &= self._idle

    @property
    def all_away(self) -> bool:
        return self.away >= self.members

    def busy(self, but: Collection[int] = ()) -> bool:
        """Whether somebody else than these may still push."""
        return not self.members <= self.away.union(but)
