"""Pushes for the gate, its decisions, and the entries that all shards carry out.

    Push ─▶ gate ─▶ Round, Answer ─▶ translate ─▶ Entry, for every shard
                                              └─▶ Give, for outcomes without weights

A round makes a version out of pushes; an answer ends one member's push or pull. A round and the
answers that come with its weights become one entry: while it is applied, finished weights are
already on their way to the members that get them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from echelon.comm.ps.messages import Outcome, PushHead
from echelon.core.errors import PeerError
from echelon.core.types import Lease
from echelon.optim.gradients import clip_factor

# To and from the gate


@dataclass(frozen=True, slots=True)
class Push:
    """A push that is staged on every shard."""

    seq: int
    """The trainer's number of it."""
    head: PushHead
    missing: frozenset[int] = frozenset()
    """Parameters without a gradient."""

    @property
    def lease(self) -> Lease:
        return self.head.lease

    @property
    def based_on(self) -> int:
        return self.head.based_on

    @property
    def row(self) -> Row:
        return Row(*self.head.row)

    @property
    def asked(self) -> int:
        return int(self.row.asked) if self.makes_sense else 0

    @property
    def finite(self) -> bool:
        return self.head.finite and math.isfinite(sum(self.head.row[:SUMMED]))

    @property
    def makes_sense(self) -> bool:
        """Whether the row, which a peer sent, is valid."""
        row = self.head.row
        return SUMMED <= len(row) <= len(Row._fields) and 0 <= row[3] < 1 << 60


class Row(NamedTuple):
    """Numbers of a push that are summed over the pushes of an update."""

    divisor: float
    """The loss's weight times the loss scale. Gradients are divided by the sum of it."""
    weight: float
    loss_sum: float
    asked: float
    """Bits of `Ask`, each with room for all members."""
    seconds: float
    """Time to compute it."""
    merit: float = math.nan
    """Agreement with the gradient of held-out samples; NaN if not measured. Not summed."""


SUMMED = 5
"""How many of the first values of a row are summed."""


@dataclass(frozen=True, slots=True)
class Round:
    """A decision: these pushes make `version`."""

    version: int
    pushes: tuple[tuple[int, int], ...]
    """(member, seq)"""
    divisor: float
    """The summed gradient is divided by it."""
    factor: float
    """Multiplies the learning rate."""
    square: float | None = None
    """Squared norm of the summed gradient, if it is known: of a single push."""
    clip: float | None = None
    """The largest norm of the mean gradient."""
    limit: float | None = None
    """The largest single value of it."""
    missing: frozenset[int] = frozenset()
    """Parameters that none of the pushes has a gradient of."""
    strengths: tuple[float, ...] = ()
    """Per push, λ of its delay compensation; empty if none is compensated."""

    @property
    def measured(self) -> bool:
        """Whether shards must report the squared norm of their parts before they apply."""
        return self.clip is not None and self.square is None

    @property
    def scale(self) -> float:
        """Factor of the summed gradient, unless it is measured first."""
        return self.scale_of(self.square or 0.0)

    def scale_of(self, square: float) -> float:
        """Return the factor of a summed gradient with this squared norm."""
        if self.clip is None:
            return 1 / self.divisor
        return min(1.0, clip_factor(math.sqrt(square) / self.divisor, self.clip)) / self.divisor


@dataclass(frozen=True, slots=True)
class Answer:
    """A decision: this outcome ends the member's last push or pull.

    The weights of `outcome.version` come with it if `outcome.weights` is set.
    """

    member: int
    seq: int
    """The number of the push; 0 for a pull."""
    outcome: Outcome


Decision = Round | Answer


# To all shards


def translate(
    decisions: Sequence[Decision], asking: Mapping[int, int], number: int
) -> tuple[list[Entry], list[Give]]:
    """Return decisions as entries, and the outcomes that come without weights.

    `asking`: the number of each member's last push or pull; `number`: of the last entry.
    """
    entries: list[Entry] = []
    told: list[Give] = []
    for decision in decisions:
        if isinstance(decision, Round):
            number += 1
            entries.append(_entry(number, decision))
            continue
        give = Give(decision.member, asking[decision.member], decision.outcome)
        if not decision.outcome.weights:
            told.append(give)
            continue
        if not entries:
            number += 1
            entries.append(Entry(number, decision.outcome.version))
        entries[-1] = entries[-1]._replace(gives=(*entries[-1].gives, give))
    return entries, told


def _entry(number: int, found: Round) -> Entry:
    return Entry(
        number,
        found.version,
        tuple(Staged(*push) for push in found.pushes),
        scale=1.0 if found.measured else found.scale,
        factor=found.factor,
        limit=found.limit,
        missing=tuple(sorted(found.missing)),
        measured=found.measured,
        divisor=found.divisor,
        clip=found.clip,
        strengths=found.strengths,
    )


class Entry(NamedTuple):
    """One step of all shards: apply these pushes, if there are any, then give the weights away.

    Every shard carries out the same entries in the same order.
    """

    number: int
    """Counts entries, from 1 on."""
    version: int
    pushes: tuple[Staged, ...] = ()
    scale: float = 1.0
    factor: float = 1.0
    limit: float | None = None
    missing: tuple[int, ...] = ()
    measured: bool = False
    """Whether shards first report the squared norm of their sums, and get the scale for it."""
    divisor: float = 1.0
    clip: float | None = None
    """The scale of a measured entry follows from divisor and clip."""
    strengths: tuple[float, ...] = ()
    """Per push, λ of its delay compensation."""
    gives: tuple[Give, ...] = ()
    forget: tuple[int, ...] = ()
    """Lost members, whose staged pushes are not needed any more."""
    anew: bool = False
    """Whether a generation begins here. Pushes of older ones that are not staged yet never come."""

    def scale_of(self, square: float) -> float:
        """Return the scale of a measured entry whose sum has this squared norm."""
        return Round(self.version, (), self.divisor, 1.0, clip=self.clip).scale_of(square)

    def to_json(self) -> dict[str, Any]:
        """Return the entry for other processes, without the outcomes."""
        return {
            "number": self.number,
            "version": self.version,
            "pushes": [list(push) for push in self.pushes],
            "scale": self.scale,
            "factor": self.factor,
            "limit": self.limit,
            "missing": list(self.missing),
            "measured": self.measured,
            "divisor": self.divisor,
            "clip": self.clip,
            "strengths": list(self.strengths),
            "gives": [[give.member, give.seq] for give in self.gives],
            "forget": list(self.forget),
            "anew": self.anew,
        }

    @classmethod
    def from_json(cls, plain: Any) -> Entry:
        try:
            return cls(
                number=int(plain["number"]),
                version=int(plain["version"]),
                pushes=tuple(Staged(int(m), int(s)) for m, s in plain["pushes"]),
                scale=float(plain["scale"]),
                factor=float(plain["factor"]),
                limit=None if plain["limit"] is None else float(plain["limit"]),
                missing=tuple(int(at) for at in plain["missing"]),
                measured=bool(plain["measured"]),
                divisor=float(plain["divisor"]),
                clip=None if plain["clip"] is None else float(plain["clip"]),
                strengths=tuple(float(value) for value in plain["strengths"]),
                gives=tuple(Give(int(m), int(s)) for m, s in plain["gives"]),
                forget=tuple(int(member) for member in plain["forget"]),
                anew=bool(plain["anew"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PeerError(f"an entry of the gate makes no sense: {error!r}") from None


class Staged(NamedTuple):
    """Names a push: its member, and the member's number of it."""

    member: int
    seq: int


class Give(NamedTuple):
    """A member that gets the weights, as the answer to its push or pull `seq`."""

    member: int
    seq: int
    outcome: Outcome | None = None
    """Only shard 0 has it, and sends it."""
