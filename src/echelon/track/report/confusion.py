"""What was taken for what: a heat map, and the mistakes worth looking at."""

from __future__ import annotations

import math
from typing import NamedTuple

from echelon.core.figures import short
from echelon.core.html import Html, el, join
from echelon.track.report.gather import Outcome

LARGEST = 40
"""With more classes a matrix is wallpaper: only the lists are shown."""
_LISTED = 12


class Mistake(NamedTuple):
    actual: int
    taken_for: int
    times: int


def confusion(outcome: Outcome) -> Html:
    """The section's inside."""
    size = len(outcome.confusion)
    parts = [_matrix(outcome)] if size <= LARGEST else [_hardest(outcome)]
    return el("div", join(parts), _mistakes(outcome), class_="confusion")


def recalls(outcome: Outcome) -> list[float]:
    """Of each class, the part that was recognised; NaN for a class without samples."""
    return [_share(row[i], sum(row)) for i, row in enumerate(outcome.confusion)]


def precisions(outcome: Outcome) -> list[float]:
    columns = list(zip(*outcome.confusion, strict=True))
    return [_share(column[i], sum(column)) for i, column in enumerate(columns)]


def mistakes(outcome: Outcome) -> list[Mistake]:
    """All pairs that were confused, the most frequent first."""
    pairs = [
        Mistake(i, j, count)
        for i, row in enumerate(outcome.confusion)
        for j, count in enumerate(row)
        if i != j and count > 0
    ]
    return sorted(pairs, key=lambda mistake: -mistake.times)


def _matrix(outcome: Outcome) -> Html:
    labels = outcome.labels
    size = len(outcome.confusion)
    tilted = max(map(len, labels), default=0) > 3
    heads = [el("th", el("span", name), scope="col", title=name) for name in labels[:size]]
    head = el(
        "tr",
        el("td"),
        join(heads),
        el("th", el("span", "recall"), scope="col", class_="side"),
    )
    shares = recalls(outcome)
    body = [_row(outcome, i, shares[i]) for i in range(size)]
    density = "wide" if size <= 12 else "middle" if size <= 20 else "dense"
    kind = f"matrix {density}" + (" tilted" if tilted else "")
    table = el("table", el("thead", head), el("tbody", join(body), _precision_row(outcome)))
    return el("div", table, class_=kind, tabindex=0)


def _row(outcome: Outcome, i: int, recall: float) -> Html:
    row = outcome.confusion[i]
    cells = [_cell(outcome, i, j, count, sum(row)) for j, count in enumerate(row)]
    label = el("th", el("span", outcome.labels[i]), scope="row", title=outcome.labels[i])
    return el("tr", label, join(cells), el("td", _bar(recall), class_="side"))


def _cell(outcome: Outcome, i: int, j: int, count: int, total: int) -> Html:
    if count == 0:
        return el("td", class_="none")
    share = count / total
    # The root lifts the few mistakes of a good model out of the background.
    heat = share if i == j else 0.1 + 0.9 * math.sqrt(share)
    kind = ("hit" if i == j else "miss") + (" strong" if heat > 0.55 else "")
    said = f"{outcome.labels[i]} → {outcome.labels[j]}: {count:,} of {total:,} ({share:.1%})"
    return el("td", short(count), class_=kind, style=f"--heat:{heat:.2f}", title=said)


def _precision_row(outcome: Outcome) -> Html:
    cells = [el("td", _percent(share)) for share in precisions(outcome)]
    total = sum(map(sum, outcome.confusion))
    hits = sum(row[i] for i, row in enumerate(outcome.confusion))
    overall = el("td", el("b", _percent(_share(hits, total))), class_="side")
    return el("tr", el("th", "precision", scope="row"), join(cells), overall, class_="foot")


def _mistakes(outcome: Outcome) -> Html:
    found = mistakes(outcome)
    if not found:
        return el("div", el("h3", "Mistakes"), el("p", "None.", class_="quiet"), class_="list")
    totals = [sum(row) for row in outcome.confusion]
    rows = [
        el(
            "li",
            el("span", outcome.labels[m.actual], el("i", " → "), outcome.labels[m.taken_for]),
            el("b", f"{m.times:,}"),
            el("small", f"of {totals[m.actual]:,}"),
        )
        for m in found[:_LISTED]
    ]
    title = el("h3", "Most frequent mistakes")
    return el("div", title, el("ol", join(rows)), class_="list")


def _hardest(outcome: Outcome) -> Html:
    shares = recalls(outcome)
    known = [i for i, share in enumerate(shares) if not math.isnan(share)]
    order = sorted(known, key=shares.__getitem__)[:_LISTED]
    rows = [
        el("li", el("span", outcome.labels[i]), _bar(shares[i]), class_="measured") for i in order
    ]
    title = el("h3", f"Hardest of {len(shares)} classes, by recall")
    return el("div", title, el("ol", join(rows)), class_="list")


def _bar(share: float) -> Html:
    if math.isnan(share):
        return el("span", "–")
    return el("span", el("i", style=f"--part:{share:.3f}"), _percent(share), class_="bar")


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.0f}%"
