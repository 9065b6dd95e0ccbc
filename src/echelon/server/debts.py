"""Outcomes that are owed: those who wait for weights, and what was summed up for each meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        self._told: dict[int, tuple[int, tuple[float, ...]]] = {}
        """What each was told last, and of which push: the answer may be lost with its gate."""

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

    def row(self, debt: Debt, with_asked: bool) -> tuple[float, ...]:
        """What was summed up since this member was last told; for the same push, the same."""
        member = debt.member
        row = self._rows.pop(member, None)
        if row is None:
            seq, told = self._told.get(member, (0, ()))
            return told if seq == debt.seq else ()
        if not with_asked:  # those are told as bits: sums of many updates would run over
            row[_ASKED] = 0.0
        self._told[member] = debt.seq, tuple(row)
        return tuple(row)

    def clear(self) -> None:
        self._debts.clear()
        self._rows.clear()
        self._told.clear()

    def state_dict(self) -> dict[str, Any]:
        """The sums alone: whoever is owed an outcome asks again where another gate takes over."""
        told = [[member, seq, list(row)] for member, (seq, row) in self._told.items()]
        return {"rows": [[m, list(row)] for m, row in self._rows.items()], "told": told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._debts.clear()
        self._rows = {member: list(row) for member, row in state["rows"]}
        self._told = {member: (seq, tuple(row)) for member, seq, row in state["told"]}
