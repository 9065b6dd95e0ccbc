"""What an update counts for: the schedule, the size of a push, its age."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.server.decisions import Push, Round
from echelon.server.terms import Terms


def round_of(
    terms: Terms,
    version: int,
    pushes: Sequence[tuple[int, Push]],
    weight: float = 1.0,
    members: int = 1,
) -> Round:
    """The round that makes `version` + 1 of these pushes, and counts for `weight`; they are of one
    or some of so many `members`."""
    divisors = [push.row.divisor for _, push in pushes]
    ages = [version - push.based_on for _, push in pushes]
    first = pushes[0][1]
    factor = weight * _factor(terms, version, sum(ages) / len(ages))
    if terms.by_speed and members > 1:  # the batches of one alone are as they are everywhere
        factor *= _length(terms, first)
    return Round(
        version=version + 1,
        pushes=tuple((member, push.seq) for member, push in pushes),
        divisor=sum(divisors),
        factor=factor,
        square=first.head.square if len(pushes) == 1 else None,
        clip=terms.clip,
        limit=terms.limit,
        missing=frozenset.intersection(*(push.missing for _, push in pushes)),
        strengths=_strengths(terms.compensate, divisors, ages),
    )


def _length(terms: Terms, push: Push) -> float:
    """A push with more samples is a longer step."""
    assert terms.batch is not None
    return push.lease.size / terms.batch


def _factor(terms: Terms, version: int, age: float) -> float:
    factor = terms.schedule.factor(version)
    return factor / (1 + age) if terms.scaled else factor


def _strengths(
    compensate: float, divisors: Sequence[float], ages: Sequence[int]
) -> tuple[float, ...]:
    """A push's part of the mean is its gradient times its share; its square is too small."""
    if not compensate or not any(ages):
        return ()
    total = sum(divisors)
    return tuple(
        compensate * total / divisor if age else 0.0
        for divisor, age in zip(divisors, ages, strict=True)
    )
