"""Whether a push may take part in an update."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.core.types import Lease
from echelon.server.applied import Applied
from echelon.server.decisions import Push
from echelon.server.roll import Roll
from echelon.server.terms import Terms
from echelon.server.ways import Way

Verdict = tuple[str, int, str]
"""(fate, staleness, reason)"""


class Examiner:
    def __init__(self, terms: Terms, way: Way, parameters: int) -> None:
        self._terms, self._way, self._parameters = terms, way, parameters

    def examine(
        self, member: int, push: Push, version: int, roll: Roll, applied: Applied
    ) -> Verdict | None:
        """What becomes of it at once; None if it may be applied."""
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

    def _makes_sense(self, push: Push) -> bool:
        """All of it comes from a peer."""
        head = push.head
        known = all(at < self._parameters for at in head.missing) if self._parameters else True
        return push.makes_sense and known and not head.square < 0

    def _overlap(self, member: int, lease: Lease, roll: Roll, applied: Applied) -> str | None:
        """Samples that are applied already, or about to be: none may count twice."""
        if parts := applied.parts(lease):
            words = ", ".join(f"[{start}, {stop})" for start, stop in parts)
            return f"of samples {_span(lease)}, {words} are applied already"
        for other, push in roll.waiting.items():
            theirs = push.lease
            if other != member and theirs.epoch == lease.epoch and _overlap(theirs, lease):
                return f"samples {_span(theirs)} of member {other} are about to be applied"
        return None

    def fault(self, pushes: Sequence[tuple[int, Push]]) -> str | None:
        """Why these pushes cannot make an update."""
        for member, push in pushes:
            if not push.finite:
                return f"the gradient of member {member} is not finite"
        if sum(push.row.divisor for _, push in pushes) <= 0:
            return "the loss gave its batch a weight of 0"
        missing = frozenset.intersection(*(push.missing for _, push in pushes))
        if self._parameters and len(missing) >= self._parameters:
            return "no parameter got a gradient"
        return None


def _overlap(one: Lease, other: Lease) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _span(lease: Lease) -> str:
    return f"[{lease.start}, {lease.stop}) of epoch {lease.epoch}"
