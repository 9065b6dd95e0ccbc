"""What the gate has all shards do, in the same order everywhere."""

from __future__ import annotations

from typing import Any, NamedTuple

from echelon.comm.servers.outcome import Outcome
from echelon.core.errors import PeerError
from echelon.server.decisions import Round


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
