"""The dial: which pushes make an update, and who may begin the next batch.

together  one push of every member, all on the same weights
quorum    the first q that are not too old; nobody waits for the others, who come too late
each      every push is an update; the fast are held back so that no push gets too old
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from echelon.server.roll import Roll
from echelon.server.terms import Terms


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
