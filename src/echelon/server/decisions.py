"""Pushes, rounds, answers, log entries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from echelon.comm.ps.messages import Outcome, PushHead
from echelon.core.errors import PeerError
from echelon.core.types import Lease
from echelon.optim.gradients import clip_factor

# --- decisions ---
# What comes to the gate, and what it decides.


class Row(NamedTuple):
    """What a push brings to be summed."""

    divisor: float
    """Gradients are divided by its sum: the loss's weight, times its scale."""
    weight: float
    loss_sum: float
    asked: float
    """Bits of `Ask`, each with room for all members."""
    seconds: float
    """Computed for it."""
    merit: float = math.nan
    """How far it agrees with held-out samples, if that was measured. Not summed."""


SUMMED = 5
"""The first values of a row."""


@dataclass(frozen=True, slots=True)
class Push:
    """One that is staged whole, on every shard."""

    seq: int
    head: PushHead
    missing: frozenset[int] = frozenset()
    """Parameters it has no gradient of."""

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
        """Its row comes from a peer."""
        row = self.head.row
        return SUMMED <= len(row) <= len(Row._fields) and 0 <= row[3] < 1 << 60


@dataclass(frozen=True, slots=True)
class Round:
    """These pushes make `version`."""

    version: int
    pushes: tuple[tuple[int, int], ...]
    """(member, seq)"""
    divisor: float
    factor: float
    """Of the learning rate."""
    square: float | None = None
    """Of the summed gradient's norm, where that is needed and known: of a single push."""
    clip: float | None = None
    """The largest norm."""
    limit: float | None = None
    """The largest single value."""
    missing: frozenset[int] = frozenset()
    """Parameters that none of them has a gradient of."""
    strengths: tuple[float, ...] = ()
    """Per push, how much it is compensated for being stale; empty if none is."""

    @property
    def measured(self) -> bool:
        """Whether shards have to tell the square of their part of the sum, before they apply."""
        return self.clip is not None and self.square is None

    @property
    def scale(self) -> float:
        """What the summed gradient is multiplied with, unless it is measured first."""
        return self.scale_of(self.square or 0.0)

    def scale_of(self, square: float) -> float:
        """The same, for a gradient with this square of its norm."""
        if self.clip is None:
            return 1 / self.divisor
        return min(1.0, clip_factor(math.sqrt(square) / self.divisor, self.clip)) / self.divisor


@dataclass(frozen=True, slots=True)
class Answer:
    """To the member's last push or pull, with the weights of `outcome.version` if it says so."""

    member: int
    seq: int
    """Of its push; 0 for a pull."""
    outcome: Outcome


Decision = Round | Answer


# --- entry ---
# What the gate has all shards do, in the same order everywhere.


class Staged(NamedTuple):
    """A push, as its trainer numbers them."""

    member: int
    seq: int


class Give(NamedTuple):
    """The weights go to this member, as the answer to its push or pull `seq`."""

    member: int
    seq: int
    outcome: Outcome | None = None
    """For the gate's own shard to tell."""


class Entry(NamedTuple):
    """Weights become `version` by these pushes, if there are any; then they are given away."""

    number: int
    """Of this entry, from 1 on."""
    version: int
    pushes: tuple[Staged, ...] = ()
    scale: float = 1.0
    factor: float = 1.0
    limit: float | None = None
    missing: tuple[int, ...] = ()
    measured: bool = False
    """Whether the gate wants the square of the sum first, and then tells the scale."""
    divisor: float = 1.0
    clip: float | None = None
    """What the scale of a measured one follows from."""
    strengths: tuple[float, ...] = ()
    """Per push, how much it is compensated for being stale."""
    gives: tuple[Give, ...] = ()
    forget: tuple[int, ...] = ()
    """Members who are gone: what they staged is not needed any more."""
    anew: bool = False
    """Whether a generation begins here: pushes of older ones that are not here never come."""

    def scale_of(self, square: float) -> float:
        """Of a measured one, whose sum has this square of its norm."""
        return Round(self.version, (), self.divisor, 1.0, clip=self.clip).scale_of(square)

    def to_json(self) -> dict[str, Any]:
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


# --- translate ---
# The gate's decisions as entries for all shards, and as answers that need no weights.

Told = tuple[int, Give]


def translate(
    decisions: Sequence[Decision], asking: Mapping[int, int], number: int
) -> tuple[list[Entry], list[Give]]:
    """`asking`: the number of each member's question; `number`: of the last entry.

    A round and the answers that come with its weights are one entry: while it is applied, what is
    done is on its way to those who get it.
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
