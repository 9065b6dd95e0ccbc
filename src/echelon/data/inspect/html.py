"""The profile of data as one HTML file that needs no other file and no script.

`page` is the whole document: a summary, then for every part its classes, its columns and example
records. Columns are cards with a plot; plots are SVG and plain boxes, sharp at any width, and show
their numbers under the pointer.
"""

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
    """Write the page atomically, replacing an existing one."""
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, give the name of a file")
    try:
        write_atomic(path, page(profile).encode("utf-8", errors="replace"))
    except OSError as error:
        raise UserError(f"{path}: the profile cannot be written: {error.strerror}") from None
    return path


_STYLE = Path(__file__).with_name("style.css")
_COLUMNS = 300
"""Columns that get a card, because a browser has to draw them all."""
_CLASSES = 60
"""Classes that get a bar."""


def page(profile: Profile) -> str:
    """Return the whole document."""
    name = Path(profile.path).name or profile.path
    body = el(
        "body",
        el("header", el("h1", name), el("p", verdict(profile), class_="verdict"), _tiles(profile)),
        el("p", profile.preparation, class_="quiet prepared") if profile.preparation else None,
        el("main", *(part for found in profile.parts for part in _part(found, profile))),
        el("footer", f"{profile.path} · looked at in {figure(profile.seconds)} s by Echelon"),
    )
    return document(name, body, style=_STYLE.read_text(encoding="utf-8"))


def verdict(profile: Profile) -> str:
    """Return e.g. `32,561 records of 15 columns, csv; the label is income: 2 classes, 3.2 to 1.`"""
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


def _part(part: PartProfile, profile: Profile) -> Iterator[Html]:
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
"""Values of a column that get a bar."""


def card(column: ColumnProfile) -> Html:
    """Return a column's card: its plot and its statistics."""
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
        yield "missing", _count_and_share(column.missing, column.records)
    if column.blank:
        yield "say nothing", _count_and_share(column.blank, column.records)
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
        yield "zeros", _count_and_share(found.zeros, found.count)
    if found.infinite:
        yield "infinite", f"{found.infinite:,}"


def _quantiles(found: Figures) -> str:
    about = "" if found.exact else "≈ "
    return about + " · ".join(number(found.quantiles[share]) for share in (5, 50, 95))


def _count_and_share(count: int, whole: int) -> str:
    return f"{count:,} ({share(count, whole)})"


# Plots

_GAP = 0.12
"""Gap between bars as a share of their width, for at most 50 bars."""
_LOWEST = 1.2
"""Minimal height of a bar in percent, so that one value in a million is visible."""


def histogram(found: Figures, said: str) -> Html:
    """Return bars over an axis; `said` is what they count, for screen readers."""
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
    label = f"{between(low, high)}: {count:,} ({share(count, whole)})"
    return el(
        "rect",
        el("title", label),
        x=f"{100 * left + 50 * gap:.3f}%",
        width=f"{max(0.05, 100 * (right - left - gap)):.3f}%",
        y=f"{100 - tall:.2f}%",
        height=f"{tall:.2f}%",
    )


def between(low: float, high: float) -> str:
    """Return the range of a bar as text, e.g. `3–5` or `0.1 to 0.2`."""
    first, last = math.ceil(low), math.floor(high)
    # Bars of whole numbers have their edges halfway between two.
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
    """Return bars of the `most` most frequent values, each with its share of `total`."""
    shown = list(counts.items())[:most]
    rows = [_value_bar(line(value), count, total) for value, count in shown]
    more = len(counts) - most
    if more > 0:
        rest = total - sum(count for _, count in shown)
        rows.append(_value_bar(f"{more:,} more", rest, total, kind="rest"))
    return el("ol", join(rows), class_="values")


def _value_bar(name: str, count: int, total: int, kind: str = "") -> Html:
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
"""Height and width up to which an array is shown as an image."""
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
    """Return an image as [H, W] or [H, W, 3]; None if the value is not an image."""
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
