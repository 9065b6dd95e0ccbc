"""The gate's policy: which pushes make an update, and who may begin the next batch.

A job's rules (`Terms`) choose one of three ways to make updates:

Together   one push of every member, all computed with the same weights (synchronous)
Quorum     the first q pushes that are not too old; the others come too late
Each       every push is an update; fast trainers are held back so that no push gets too old
           (bounded staleness), unless there is no bound (asynchronous)

A `Way` decides by the states of the trainers (`Roll`). Before that, an `Examiner` checks each push:
it may be repeated, late, or wrong. `round_of` says what an update counts for: the schedule, the
size of a push, its age.
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

# The rules of a job


@dataclass(frozen=True, slots=True)
class Terms:
    """The rules of a job that the gate keeps to: plain data from the trainers, checked."""

    staleness: int | None
    """How many updates a push may be behind; None: any number."""
    quorum: int | None
    """Pushes that make an update; None: one of each member."""
    schedule: Schedule
    batch: int | None = None
    """Samples of an update."""
    samples: int | None = None
    """Samples of an epoch."""
    steps: int | None = None
    """The last version of the job."""
    due: tuple[int, ...] = ()
    """All members have to meet at every multiple of these versions."""
    clip: float | None = None
    """The largest norm of an update's gradient."""
    limit: float | None = None
    """The largest single value of it."""
    compensate: float = 0.0
    """λ of delay compensation."""
    scaled: bool = False
    """Whether stale updates count for less."""
    balance: bool = True
    """Whether trainers get samples by their speed."""

    @property
    def together(self) -> bool:
        return self.quorum is None

    @property
    def by_speed(self) -> bool:
        """Whether each push is an update with as many samples as its trainer's speed allows."""
        return self.quorum == 1 and self.balance and self.batch is not None

    def is_over(self, version: int) -> bool:
        return self.steps is not None and version >= self.steps

    @classmethod
    def of(cls, rules: Mapping[str, Any]) -> Terms:
        """Return the terms of a set-up's rules. Raises PeerError if they are invalid."""
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


# Which pushes make an update


def way_of(terms: Terms) -> Way:
    if terms.quorum is None:
        return Together(terms.staleness)
    if terms.quorum == 1:
        return Each(terms.staleness)
    return Quorum(terms.staleness, terms.quorum)


class Way(ABC):
    """How updates are made of pushes, at most `staleness` updates behind (None: without bound)."""

    def __init__(self, staleness: int | None) -> None:
        self._staleness = staleness

    @abstractmethod
    def chosen(self, roll: Roll, version: int) -> list[int]:
        """Return the members whose waiting pushes make the next version; empty if none do yet."""

    def admits(self, roll: Roll, member: int, based_on: int, version: int) -> bool:  # noqa: ARG002
        """Return whether a push is not too old, and will not be before it is applied."""
        return self._staleness is None or version - based_on <= self._staleness

    def may_begin(self, roll: Roll, member: int) -> bool:  # noqa: ARG002
        """Return whether a member may have weights for its next batch now."""
        return True

    def share(self, members: int, batch: int) -> float:  # noqa: ARG002
        """Return the samples of a push if speeds do not matter; 0: the members agree on it."""
        return float(batch)


class Together(Way):
    """One push of every member makes an update."""

    def chosen(self, roll: Roll, version: int) -> list[int]:  # noqa: ARG002
        return sorted(roll.members) if roll.waiting.keys() >= roll.members else []

    def share(self, members: int, batch: int) -> float:  # noqa: ARG002
        return 0.0


class Quorum(Way):
    """The first `quorum` pushes make an update."""

    def __init__(self, staleness: int | None, quorum: int) -> None:
        super().__init__(staleness)
        self._quorum = quorum

    def chosen(self, roll: Roll, version: int) -> list[int]:  # noqa: ARG002
        need = min(self._quorum, len(roll.members))
        here = list(roll.waiting)
        # At the end of an epoch, or before a meeting, no other member may be going to push.
        enough = len(here) >= need or not roll.busy(but=here)
        return here[:need] if here and enough else []

    def share(self, members: int, batch: int) -> float:
        return max(1.0, batch / min(self._quorum, members or 1))


class Each(Way):
    """Every push makes an update, and none gets more than s updates old.

    Let pushes under way be computed with the weights of versions v₁ ≤ v₂ ≤ …, and V be the present
    version. This way keeps V + m − 1 ≤ v_m + s for every m: even if all older pushes are applied
    first, push m is applied to weights at most s versions newer than its own. The oldest push can
    always be applied, so no member waits for ever.
    """

    def chosen(self, roll: Roll, version: int) -> list[int]:
        for member in sorted(roll.waiting, key=roll.versions.__getitem__):
            others = (v for who, v in roll.versions.items() if who != member)
            if self._holds(others, version + 1):
                return [member]
        return []

    def admits(self, roll: Roll, member: int, based_on: int, version: int) -> bool:
        """Check the push against all others under way. A member that was lost in between may come
        back when others have taken its place."""
        return self._holds({**roll.versions, member: based_on}.values(), version)

    def may_begin(self, roll: Roll, member: int) -> bool:
        others = len(roll.versions.keys() - {member})
        return self._staleness is None or others <= self._staleness

    def _holds(self, versions: Iterable[int], newest: int) -> bool:
        s = self._staleness
        return s is None or all(newest + m <= v + s for m, v in enumerate(sorted(versions)))


# States of trainers
#
# coming ─ begins ─▶ at work (weights of v) ─ push ─▶ waiting ─ applied ─▶ (owed weights) ─▶ at
# work    ▲                     └───────────── rests, meets ─────────────▶ away ─┘


class Roll:
    """States of a generation's members: the version each computes with, and which are away."""

    def __init__(self, members: Iterable[int] = ()) -> None:
        self.members = set(members)
        self.away: set[int] = set()
        """Members that will not push before they ask for weights again."""
        self._idle: set[int] = set()
        """Those of `away` that have nothing to compute, and are not only in a meeting."""
        self.versions: dict[int, int] = {}
        """Per member whose gradient is under way or waits: the version it is computed with."""
        self.waiting: dict[int, Push] = {}
        """Pushes that wait to be applied, in the order they came."""

    @property
    def all_away(self) -> bool:
        return self.away >= self.members

    def busy(self, but: Collection[int] = ()) -> bool:
        """Return whether any member other than `but` may still push."""
        return not self.members <= self.away.union(but)

    def begin(self, member: int, version: int) -> None:
        """Note that a member computes with the weights of `version`."""
        self.away.discard(member)
        self._idle.discard(member)
        self.waiting.pop(member, None)
        self.versions[member] = version

    def wait(self, member: int, push: Push) -> None:
        """Note a push that waits to be applied."""
        self.begin(member, push.based_on)
        self.waiting[member] = push

    def settled(self, member: int) -> None:
        """Note that a member's gradient is applied or dropped."""
        self.waiting.pop(member, None)
        self.versions.pop(member, None)

    def rest(self, member: int, *, meets: bool = False) -> None:
        """Note that a member will not push before it asks for weights again."""
        self.settled(member)
        self.away.add(member)
        (self._idle.discard if meets else self._idle.add)(member)

    def come_back(self) -> None:
        """End a meeting: expect all members again but those without anything to compute."""
        self.away &= self._idle

    def ask_again(self, member: int) -> None:
        """Drop a waiting push that the member will repeat. It counts as at work until then."""
        self.waiting.pop(member, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a gate that takes over.

        Waiting pushes are left out: their members repeat them, and count as at work until then.
        """
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


# Whether a push may take part

Verdict = tuple[str, int, str]
"""(fate, staleness, reason)"""


class Examiner:
    """Checks pushes before they wait for an update."""

    def __init__(self, terms: Terms, way: Way, parameters: int) -> None:
        self._terms, self._way, self._parameters = terms, way, parameters

    def examine(
        self, member: int, push: Push, version: int, roll: Roll, applied: Applied
    ) -> Verdict | None:
        """Return why a push is answered at once, or None if it may be applied."""
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

    def fault(self, pushes: Sequence[tuple[int, Push]]) -> str | None:
        """Return why these pushes cannot make an update, or None if they can."""
        for member, push in pushes:
            if not push.finite:
                return f"the gradient of member {member} is not finite"
        if sum(push.row.divisor for _, push in pushes) <= 0:
            return "the loss gave its batch a weight of 0"
        missing = frozenset.intersection(*(push.missing for _, push in pushes))
        if self._parameters and len(missing) >= self._parameters:
            return "no parameter got a gradient"
        return None

    def _makes_sense(self, push: Push) -> bool:
        """Check what a peer sent before it is used."""
        head = push.head
        known = all(at < self._parameters for at in head.missing) if self._parameters else True
        return push.makes_sense and known and not head.square < 0

    def _overlap(self, member: int, lease: Lease, roll: Roll, applied: Applied) -> str | None:
        """Return why samples would count twice: some are applied already, or about to be."""
        if parts := applied.parts(lease):
            words = ", ".join(f"[{start}, {stop})" for start, stop in parts)
            return f"of samples {_span(lease)}, {words} are applied already"
        for other, push in roll.waiting.items():
            theirs = push.lease
            if other != member and theirs.epoch == lease.epoch and _intersect(theirs, lease):
                return f"samples {_span(theirs)} of member {other} are about to be applied"
        return None


def _intersect(one: Lease, other: Lease) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _span(lease: Lease) -> str:
    return f"[{lease.start}, {lease.stop}) of epoch {lease.epoch}"


# What an update counts for


def round_of(
    terms: Terms,
    version: int,
    pushes: Sequence[tuple[int, Push]],
    weight: float = 1.0,
    members: int = 1,
) -> Round:
    """Return the round that makes `version` + 1 of these (member, push) pairs.

    `weight`: what it counts for by the merit of its members; `members`: of the generation.
    """
    divisors = [push.row.divisor for _, push in pushes]
    ages = [version - push.based_on for _, push in pushes]
    first = pushes[0][1]
    factor = weight * _factor(terms, version, sum(ages) / len(ages))
    if terms.by_speed and members > 1:  # a single trainer has batches of the full size
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


def _factor(terms: Terms, version: int, age: float) -> float:
    """Return the schedule's factor of the learning rate, less for stale updates if wanted."""
    factor = terms.schedule.factor(version)
    return factor / (1 + age) if terms.scaled else factor


def _length(terms: Terms, push: Push) -> float:
    """Return the step's length in proportion to the samples of the push."""
    assert terms.batch is not None
    return push.lease.size / terms.batch


def _strengths(
    compensate: float, divisors: Sequence[float], ages: Sequence[int]
) -> tuple[float, ...]:
    """Return each push's λ of delay compensation; empty if no push is stale.

    A push enters the mean multiplied by its share, divisor / total. The compensation is quadratic
    in that product, so λ is divided by the share once.
    """
    if not compensate or not any(ages):
        return ()
    total = sum(divisors)
    return tuple(
        compensate * total / divisor if age else 0.0
        for divisor, age in zip(divisors, ages, strict=True)
    )
