"""One column as a card: its plot and its figures."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.core.format import number, share
from echelon.core.html import Html, el, join
from echelon.data.inspect.html.plots import histogram, values
from echelon.data.inspect.numbers import Figures
from echelon.data.inspect.profile import ColumnProfile, told

_VALUES = 8


def card(column: ColumnProfile) -> Html:
    head = el(
        "figcaption",
        el("h3", column.name or "(no name)"),
        el("small", column.type),
    )
    facts = [el("div", el("dt", name), el("dd", value)) for name, value in _facts(column)]
    return el(
        "figure", head, *_plots(column), el("dl", join(facts), class_="facts"), class_="column"
    )


def _plots(column: ColumnProfile) -> Iterator[Html]:
    if column.is_category:
        assert column.counts is not None
        yield values(column.counts, column.present, _VALUES)
        return
    if column.lengths is not None:
        yield el("h4", column.unit)
        yield histogram(column.lengths, column.unit)
    if column.numbers is not None:
        yield el("h4", "values") if column.lengths is not None else Html()
        yield histogram(column.numbers, "values")
    if column.words is not None and column.words.max > 1:
        yield el("h4", "words")
        yield histogram(column.words, "words")


def _facts(column: ColumnProfile) -> Iterator[tuple[str, str]]:
    if column.missing:
        yield "missing", _part(column.missing, column.records)
    if column.blank:
        yield "say nothing", _part(column.blank, column.records)
    if column.distinct is not None:
        yield "different", told(column.distinct)
    if column.span is not None:
        yield "from", column.span[0]
        yield "to", column.span[1]
    if column.lengths is not None and not column.is_category:
        yield from _figures(column.lengths, f" {column.unit}")
    if column.numbers is not None:
        yield from _figures(column.numbers, "")
    if column.words is not None and not column.is_category:
        yield "words, 5, 50, 95 %", _quantiles(column.words)
    if column.channels is not None:
        yield "mean by channel", " · ".join(number(mean) for mean, _ in column.channels)
        yield "deviation", " · ".join(number(std) for _, std in column.channels)


def _figures(found: Figures, unit: str) -> Iterator[tuple[str, str]]:
    yield "lowest, highest", f"{number(found.min)} – {number(found.max)}{unit}"
    yield "mean ± deviation", f"{number(found.mean)} ± {number(found.std)}"
    yield "5, 50, 95 %", _quantiles(found)
    if found.zeros and not unit:
        yield "zeros", _part(found.zeros, found.count)
    if found.infinite:
        yield "infinite", f"{found.infinite:,}"


def _quantiles(found: Figures) -> str:
    about = "" if found.exact else "≈ "
    return about + " · ".join(number(found.quantiles[share]) for share in (5, 50, 95))


def _part(count: int, whole: int) -> str:
    return f"{count:,} ({share(count, whole)})"
