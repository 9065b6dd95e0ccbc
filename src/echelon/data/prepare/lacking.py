"""Steps and features for records that lack columns: nobody knows the label of what is predicted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from echelon.core.errors import DataError
from echelon.data.prepare.feature import Feature
from echelon.data.prepare.learnt import Learnt
from echelon.data.prepare.segments import compares
from echelon.data.prepare.step import Step

Steps = Sequence[tuple[Step, Learnt]]
Features = Sequence[tuple[Feature, Learnt]]
_TARGET = "y"
"""What jobs take for their target, unless they say otherwise."""


class Left(NamedTuple):
    """What can be done without some columns."""

    cleaning: Steps
    features: Features
    raw: set[str]
    """The columns of the records that it is done with."""
    gone: set[str]
    """Those there will not be, of the records or made."""


def left(cleaning: Steps, features: Features, without: Collection[str]) -> Left:
    """What is made of a column that is gone is gone too, and so on to the last feature."""
    gone, made, raw = {*without}, set[str](), set[str]()
    steps = []
    for step, known in cleaning:
        some = step.apart_from(gone)
        gone |= {new for new, old in step.adds().items() if old in gone}
        if some is None or compares(step):  # a new record is none of the set that was compared
            continue
        raw |= {*some.reads()} - made
        made |= {*some.adds()}
        steps.append((some, known))
    encoding = []
    for feature, known in features:
        if gone & {*feature.sources}:
            gone.add(feature.name)
            continue
        raw |= {*feature.sources} - made
        made.add(feature.name)
        encoding.append((feature, known))
    return Left(steps, encoding, raw, gone)


def roots(column: str, cleaning: Steps, features: Features) -> set[str]:
    """The columns of the records that this one is made of in the end."""
    found = {column}
    for feature, _ in reversed(features):
        if feature.name in found:
            found = (found - {feature.name}) | {*feature.sources}
    for step, _ in reversed(cleaning):
        found = {step.adds().get(name, name) for name in found}
    return found


def labels(cleaning: Steps, features: Features) -> set[str]:
    """The columns of the records that targets alone are made of."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for feature, _ in features:
        if not feature.name.startswith("_"):
            target = feature.kind == "classes" or feature.name == _TARGET
            found[target] |= roots(feature.name, cleaning, features)
    return found[True] - found[False]


def refuse_lacking(needed: Collection[str], there: Iterable[str], where: str = "") -> None:
    """One line for records that cannot be encoded, whatever they hold."""
    names = list(there)
    lacking = ", ".join(map(repr, sorted({*needed} - {*names})))
    if lacking:
        raise DataError(
            f"{where}new records must have what the recipe reads: they lack {lacking} "
            f"(their columns: {', '.join(names)})"
        )
