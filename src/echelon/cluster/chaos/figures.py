"""How long faults took to be noticed and to be mended, all in all and by kind."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echelon.cluster.chaos.deeds import Deed

_LOSING = ("kill", "freeze", "partition")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of several faults; those that were never noticed have no part in it."""

    count: int
    median: float | None
    worst: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figures:
        known = [value for value in values if value is not None]
        if not known:
            return cls(0, None, None)
        return cls(len(known), round(statistics.median(known), 3), round(max(known), 3))


@dataclass(frozen=True, slots=True)
class Kind:
    """Faults of one kind."""

    name: str
    happened: int
    detected: Figures
    recovered: Figures


def kinds(deeds: Sequence[Deed]) -> list[Kind]:
    """By name."""
    names = sorted({_name(deed) for deed in deeds})
    return [_kind(name, [deed for deed in deeds if _name(deed) == name]) for name in names]


def losses(deeds: Sequence[Deed]) -> Kind:
    """Faults that cost somebody; how long a newcomer takes to start is another matter."""
    return _kind("loss", [deed for deed in deeds if deed.fault.verb in _LOSING])


def _kind(name: str, deeds: Sequence[Deed]) -> Kind:
    detected = Figures.of(deed.detected for deed in deeds)
    return Kind(name, len(deeds), detected, Figures.of(deed.recovered for deed in deeds))


def _name(deed: Deed) -> str:
    """`kill trainer`, whichever one it was."""
    return f"{deed.fault.verb} {deed.fault.target}".strip()
