"""Who wants all to meet, and who knows of it.

Whoever is told goes to the meeting and pushes nothing before it is over. It is over when somebody
begins anew and all others are away and know of it; whatever came up later stays to be told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from echelon.core.types import Ask
from echelon.server.terms import Terms

KINDS = tuple(kind for kind in Ask if kind not in (Ask.NOTHING, Ask.BALANCE))
"""Nobody has to meet for its speed: how much a trainer gets is decided here."""


class Asks:
    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.bits = 0
        """One of each kind that is asked for."""
        self._told: dict[int, int] = {}

    def hear(self, asked: int) -> None:
        """What a push brings: kinds, added up over members."""
        for kind in KINDS:
            if kind.among(asked):
                self.bits |= kind

    def reached(self, version: int) -> None:
        """All have to meet where something is due, and at the end."""
        if any(version % every == 0 for every in self._terms.due):
            self.bits |= Ask.MEET
        self.reached_end(version)

    def reached_end(self, version: int) -> None:
        if self._terms.is_over(version):
            self.bits |= Ask.MEET

    def tell(self, member: int) -> int:
        """What this member has to know, which it now does."""
        self._told[member] = self.bits
        return self.bits

    def met(self, members: Collection[int]) -> None:
        """All are away: what everybody knows of is done with."""
        known = self.bits
        for member in members:
            known &= self._told.get(member, 0)
        self.bits &= ~known

    def state_dict(self) -> dict[str, Any]:
        return {"bits": self.bits, "told": [list(pair) for pair in self._told.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.bits = state["bits"]
        self._told = dict(state["told"])

    def clear(self) -> None:
        self.bits = 0
        self._told.clear()
