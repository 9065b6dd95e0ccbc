"""The gate's decisions as entries for all shards, and as answers that need no weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.server.decisions import Decision, Round
from echelon.server.entry import Entry, Give, Staged

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
