"""What an update counts for: the schedule, the size of a push, its age."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.server.decisions import Push, Round
from echelon.server.terms import Terms


def round_of(
    terms: Terms, version: int, pushes: Sequence[tuple[int, Push]], weight: float = 1.0
) -> Round:
    """The round that makes `version` + 1 of these members' pushes, and counts for `weight`."""
    divisors = [push.row.divisor for _, push in pushes]
    ages = [version - push.based_on for _, push in pushes]
    first = pushes[0][1]
    return Round(
        version=version + 1,
        pushes=tuple((member, push.seq) for member, push in pushes),
        divisor=sum(divisors),
        factor=weight * _factor(terms, version, first.lease.size, sum(ages) / len(ages)),
        square=first.head.square if len(pushes) == 1 else None,
        clip=terms.clip,
        limit=terms.limit,
        missing=frozenset.intersection(*(push.missing for _, push in pushes)),
        strengths=_strengths(terms.compensate, divisors, ages),
    )


def _factor(terms: Terms, version: int, size: int, age: float) -> float:
    factor = terms.schedule.factor(version)
    if terms.bounded and terms.balance and terms.batch is not None:
        factor *= size / terms.batch  # a push with more samples is a longer step
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
