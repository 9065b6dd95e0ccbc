"""Histograms and bars, as SVG and plain boxes: crisp at every width, figures under the pointer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from echelon.core.format import cut, line, number, share
from echelon.core.html import Html, Scale, el, join
from echelon.data.inspect.numbers import Figures, Histogram

_GAP = 0.12
"""Of a bar's width, where there are few."""
_LOWEST = 1.2
"""Per cent of the height that a bar has at least: one of a million is not none."""


def histogram(found: Figures, said: str) -> Html:
    """Bars over an axis; `said` is what they count, for those who cannot see them."""
    shape = found.histogram
    x = Scale(shape.edges[0], shape.edges[-1])
    whole = sum(shape.counts) + shape.below + shape.above
    tallest = max(1, *shape.counts)
    bars = [_bar(shape, place, x, tallest, whole) for place, n in enumerate(shape.counts) if n]
    svg = el("svg", join(bars), _axis(x), role="img", aria_label=_spoken(found, said))
    return join((el("div", svg, class_="plot"), _left_out(shape)))


def values(counts: Mapping[Any, int], total: int, most: int) -> Html:
    """The most frequent values, each with its share."""
    rows = [_value(line(value), count, total) for value, count in list(counts.items())[:most]]
    more = len(counts) - most
    if more > 0:
        rest = total - sum(list(counts.values())[:most])
        rows.append(_value(f"{more:,} more", rest, total, kind="rest"))
    return el("ol", join(rows), class_="values")


def _value(name: str, count: int, total: int, kind: str = "") -> Html:
    part = f"--part: {count / max(1, total):.4f}"
    return el(
        "li",
        el("span", cut(name, 60), title=name),
        el("i", style=part),
        el("b", f"{count:,}"),
        el("small", share(count, total)),
        class_=kind or None,
    )


def _bar(shape: Histogram, place: int, x: Scale, tallest: int, whole: int) -> Html:
    low, high = shape.edges[place], shape.edges[place + 1]
    count = shape.counts[place]
    left, right = x.place(low), x.place(high)
    gap = _GAP * (right - left) if len(shape.counts) <= 50 else 0.0
    tall = max(_LOWEST, 100 * count / tallest)
    told = f"{between(low, high)}: {count:,} ({share(count, whole)})"
    return el(
        "rect",
        el("title", told),
        x=f"{100 * left + 50 * gap:.3f}%",
        width=f"{max(0.05, 100 * (right - left - gap)):.3f}%",
        y=f"{100 - tall:.2f}%",
        height=f"{tall:.2f}%",
    )


def between(low: float, high: float) -> str:
    """The numbers of a bar; those of whole numbers have their edges between two."""
    first, last = math.ceil(low), math.floor(high)
    if low - math.floor(low) == 0.5 and high - math.floor(high) == 0.5:
        return f"{first:,}" if first == last else f"{first:,}–{last:,}"
    return f"{number(low)} to {number(high)}"


def _axis(x: Scale) -> Html:
    parts = [el("line", x1="0", x2="100%", y1="100%", y2="100%", class_="axis")]
    for place, label in x.ticks(4):
        at = f"{100 * place:.2f}%"
        anchor = "start" if place < 0.06 else "end" if place > 0.94 else "middle"
        parts.append(el("text", label, x=at, y="100%", dy="1.5em", text_anchor=anchor))
    return join(parts)


def _left_out(shape: Histogram) -> Html | None:
    ends = [
        f"{count:,} {where}"
        for count, where in ((shape.below, "below"), (shape.above, "above"))
        if count
    ]
    return el("p", f"{' and '.join(ends)} these", class_="quiet ends") if ends else None


def _spoken(found: Figures, said: str) -> str:
    middle = number(found.quantiles[50])
    return f"{said}: from {number(found.min)} to {number(found.max)}, the median is {middle}"
