"""Profile page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.format import cut, figure, line, number, share, short, size
from echelon.core.html import Html, Scale, document, el, join, section, tile
from echelon.data.inspect.profile import ColumnProfile, Example, PartProfile, Profile, told
from echelon.data.inspect.sketches import Figures, Histogram


def write_html(profile: Profile, path: str | Path) -> Path:
    """Write the page, in place of an earlier one, all of it or nothing."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, give the name of a file")
    try:
        write_atomic(path, page(profile).encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"{path}: the profile cannot be written: {error.strerror}") from None
    return path


_HERE = Path(__file__).parent
_COLUMNS = 300
"""Columns that get a card: a browser has to draw them all."""
_CLASSES = 60


def page(profile: Profile) -> str:
    """The whole document."""
    name = Path(profile.path).name or profile.path
    body = el(
        "body",
        el("header", el("h1", name), el("p", verdict(profile), class_="verdict"), _tiles(profile)),
        el("p", profile.preparation, class_="quiet prepared") if profile.preparation else None,
        el("main", *(part for found in profile.parts for part in _page_part(found, profile))),
        el("footer", f"{profile.path} · looked at in {figure(profile.seconds)} s by Echelon"),
    )
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    return document(name, body, style=style)


def verdict(profile: Profile) -> str:
    """`32,561 records of 15 columns, csv; the label is income: 2 classes, 3.2 to 1.`"""
    first = profile.parts[0]
    words = f"{profile.records:,} records of {len(first.columns):,} columns, {first.format}"
    if len(profile.parts) > 1:
        words += f", in {len(profile.parts)} parts"
    if not first.balance:
        return f"{words}."
    counts = list(first.balance.values())
    balance = f"{len(counts):,} classes, {counts[0] / counts[-1]:.3g} to 1"
    return f"{words}; the label is {first.label}: {balance}."


def _tiles(profile: Profile) -> Html:
    records = profile.records
    cells = sum(column.records for part in profile.parts for column in part.columns)
    missing = sum(column.nothing for part in profile.parts for column in part.columns)
    found = [
        tile("records", f"{records:,}" if records < 1e7 else short(records)),
        tile("columns", f"{max(len(part.columns) for part in profile.parts):,}"),
        tile("on disk", size(profile.bytes)),
        tile("missing values", share(missing, max(1, cells))),
    ]
    if profile.parts[0].balance:
        found.append(tile("classes", f"{len(profile.parts[0].balance):,}"))
    return el("div", join(found), class_="tiles")


def _page_part(part: PartProfile, profile: Profile) -> Iterator[Html]:
    named = len(profile.parts) > 1
    if named:
        note = f"{part.records:,} records · {size(part.bytes)}"
        yield el("h2", part.name or "all", el("small", note), class_="part")
    if part.unread.faults:
        head, *faults = part.unread.lines()
        yield section("Not read", el("ul", *(el("li", fault) for fault in faults)), note=head)
    if part.label is not None:
        yield section("Classes", _classes(part), note=f"of {part.label}")
    if part.columns:
        yield section("Columns", _columns(part), note=f"{len(part.columns):,}")
    if part.examples:
        note = "out of all, by chance"
        yield section("Examples", examples(part.examples), note=note)


def _classes(part: PartProfile) -> Html:
    assert part.label is not None
    column = part.column(part.label)
    if column.counts is None:
        distinct = "many" if column.distinct is None else told(column.distinct)
        return el("p", f"{distinct} different values: too many to be classes.", class_="quiet")
    return el("div", values(column.counts, column.present, _CLASSES), class_="classes")


def _columns(part: PartProfile) -> Html:
    cards = [card(column) for column in part.columns[:_COLUMNS]]
    more = len(part.columns) - _COLUMNS
    rest = el("p", f"and {more:,} more (--json has all)", class_="quiet") if more > 0 else None
    return join((el("div", join(cards), class_="columns"), rest))


# One column

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


# Plots

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


def values(counts: Mapping[Any, int], total: int, most: int) -> Html:
    """The most frequent values, each with its share."""
    rows = [_plot_value(line(value), count, total) for value, count in list(counts.items())[:most]]
    more = len(counts) - most
    if more > 0:
        rest = total - sum(list(counts.values())[:most])
        rows.append(_plot_value(f"{more:,} more", rest, total, kind="rest"))
    return el("ol", join(rows), class_="values")


def _plot_value(name: str, count: int, total: int, kind: str = "") -> Html:
    part = f"--part: {count / max(1, total):.4f}"
    return el(
        "li",
        el("span", cut(name, 60), title=name),
        el("i", style=part),
        el("b", f"{count:,}"),
        el("small", share(count, total)),
        class_=kind or None,
    )


# Example records

_LARGEST = 512
_CHANNELS = (1, 3)


def examples(found: Sequence[Example]) -> Html:
    return el("div", join([_example(example) for example in found]), class_="samples")


def _example(example: Example) -> Html:
    parts = [el("div", el("dt", "record"), el("dd", f"{example.record:,}"), class_="number")]
    parts += [
        el("div", el("dt", name), el("dd", _value(value))) for name, value in example.values.items()
    ]
    return el("dl", join(parts))


def _value(value: Any) -> Html | str:
    pixels = _pixels(value)
    return line(value) if pixels is None else _image(pixels)


def _pixels(value: Any) -> np.ndarray[Any, Any] | None:
    """[H, W] or [H, W, 3] if this is an image; None if it is not."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or max(value.shape) > _LARGEST:
        return None
    if value.ndim == 2:
        return value
    if value.ndim != 3:
        return None
    if value.shape[0] in _CHANNELS:
        value = value.transpose(1, 2, 0)
    return value.squeeze(-1) if value.shape[-1] == 1 else value if value.shape[-1] == 3 else None


def _image(pixels: np.ndarray[Any, Any]) -> Html:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "png")
    content = base64.b64encode(file.getvalue()).decode()
    return el("img", src=f"data:image/png;base64,{content}", alt="")
