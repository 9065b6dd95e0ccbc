"""What comes to the gate, and what it decides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from echelon.comm.servers.messages import PushHead
from echelon.comm.servers.outcome import Outcome
from echelon.core.types import Lease
from echelon.optim.gradients import clip_factor


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
