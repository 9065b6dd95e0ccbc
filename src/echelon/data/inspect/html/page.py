"""The profile of data as a page: one file that needs nothing else, not even a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from echelon.core.format import figure, share, short, size
from echelon.core.html import Html, document, el, join, section, tile
from echelon.data.inspect.html.column import card
from echelon.data.inspect.html.examples import examples
from echelon.data.inspect.html.plots import values
from echelon.data.inspect.profile import PartProfile, Profile, told

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
        el("main", *(part for found in profile.parts for part in _part(found, profile))),
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
