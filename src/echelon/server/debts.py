"""Outcomes that are owed: those who wait for weights, and what was summed up for each meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from echelon.server.decisions import SUMMED, Row

_ASKED = Row._fields.index("asked")


@dataclass(frozen=True, slots=True)
class Debt:
    member: int
    seq: int
    fate: str
    staleness: int = 0
    reason: str = ""


class Debts:
    """First come, first served."""

    def __init__(self) -> None:
        self._debts: dict[int, Debt] = {}
        self._rows: dict[int, list[float]] = {}

    def add(self, debt: Debt) -> None:
        self._debts[debt.member] = debt

    def drop(self, member: int) -> None:
        """It asks for something else, or is gone."""
        self._debts.pop(member, None)

    def next(self, may: Callable[[int], bool]) -> Debt | None:
        """The first that may be paid; it is paid then."""
        for member in self._debts:
            if may(member):
                return self._debts.pop(member)
        return None

    def sum(self, rows: Sequence[Row], members: Iterable[int]) -> None:
        """An update with these rows is made: all members are to hear of it."""
        total = [sum(column) for column in zip(*(row[:SUMMED] for row in rows), strict=True)]
        for member in members:
            held = self._rows.setdefault(member, [0.0] * len(total))
            for at, value in enumerate(total):
                held[at] += value

    def row(self, member: int, with_asked: bool) -> tuple[float, ...]:
        """What was summed up since this member was last told."""
        row = self._rows.pop(member, None)
        if row is None:
            return ()
        if not with_asked:  # those are told as bits: sums of many updates would run over
            row[_ASKED] = 0.0
        return tuple(row)

    def clear(self) -> None:
        self._debts.clear()
        self._rows.clear()
