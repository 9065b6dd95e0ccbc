"""How much a term is worth to a vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from echelon.data.prepare.text.records import Records, is_new

Floats = NDArray[np.float64]
_CELLS = 1 << 18


class Scored(NamedTuple):
    """Terms, one row each, and their scores: the more the better."""

    terms: Records
    scores: Floats

    def best(self, size: int | None) -> Scored:
        """The best `size` of them; of equal ones those of the smallest hashes."""
        order = np.lexsort((self.terms["hash"], -self.scores))[:size]
        return Scored(self.terms[order], self.scores[order])


def by_frequency(records: Records) -> Scored:
    return Scored(records, records["count"].astype(np.float64))


def by_class(records: Records, classes: NDArray[Any], choose: str) -> Scored:
    """By what a term's presence says of a text's class; `classes` has the texts of each."""
    new = is_new(records["hash"])
    firsts, which = np.flatnonzero(new), np.cumsum(new) - 1
    terms = records[firsts]
    for field in ("count", "texts"):
        terms[field] = np.add.reduceat(records[field], firsts) if len(firsts) else 0
    rule = _information if choose == "information" else _chi2
    scores = np.empty(len(terms))
    step = max(1, _CELLS // len(classes))
    for low in range(0, len(terms), step):
        start, stop = np.searchsorted(which, [low, low + step])
        some = records[start:stop]
        present = np.zeros((min(step, len(terms) - low), len(classes)))
        present[which[start:stop] - low, some["group"]] = some["texts"]
        scores[low : low + step] = rule(present, classes.astype(np.float64))
    return Scored(terms, scores)


def _information(present: Floats, classes: Floats) -> Floats:
    """Mutual information of "the text has the term" and the class, in nats."""
    total, having = classes.sum(), present.sum(1, keepdims=True)
    there = _shared(present, having, classes, total)
    absent = _shared(classes - present, total - having, classes, total)
    result: Floats = (there + absent) / total
    return result


def _shared(both: Floats, one: Floats, other: Floats, total: float) -> Floats:
    expected = one * other
    ratio = np.ones_like(both)
    np.divide(both * total, expected, out=ratio, where=(both > 0) & (expected > 0))
    result: Floats = (both * np.log(ratio)).sum(1)
    return result


def _chi2(present: Floats, classes: Floats) -> Floats:
    """Between the texts of each class that have the term and those expected by chance."""
    expected = present.sum(1, keepdims=True) * classes / classes.sum()
    result: Floats = np.divide(
        (present - expected) ** 2, expected, out=np.zeros_like(present), where=expected > 0
    ).sum(1)
    return result
