"""A profile of data on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.core.figures import size
from echelon.data.inspect.numbers import Figures
from echelon.data.inspect.profile import ColumnProfile, PartProfile, Profile, top
from echelon.data.inspect.showing import cut, line, number, share, told

_BARS = "▁▂▃▄▅▆▇█"
_BINS = 20
_CLASSES = 20
_WIDE = 30
_NAME, _TYPE = 32, 28
_VALUES, _VALUE = 3, 20
_HEADS = (
    *("COLUMN", "TYPE", "MISSING", "DIFFERENT", "LOWEST", "MEDIAN", "MEAN", "HIGHEST"),
    "VALUES",
)
_FIGURES = range(2, 8)
_NARROW = 108
"""A terminal of fewer columns has no room for all figures."""
_LEFT_OUT = (4, 6)  # lowest and mean


def show(out: Console, profile: Profile) -> None:
    """Every part: its columns, its classes, examples of it."""
    estimated = False
    for part in profile.parts:
        if part is not profile.parts[0]:
            out.print()
        _show_part(out, part, profile)
        estimated |= any(_estimated(column) for column in part.columns)
    if profile.preparation is not None:
        out.print(Text(f"\n{line(profile.preparation)}"))
    if estimated:
        out.print(Text("\n≈ an estimate: from hashes, or from an even sample of records", "dim"))


def _show_part(out: Console, part: PartProfile, profile: Profile) -> None:
    name = "/".join(filter(None, (profile.path, part.name)))
    files = f"{part.files:,} files, " if part.files > 1 else ""
    facts = f"{part.format}, {files}{size(part.bytes)}"
    records = f"{part.records:,} records, {len(part.columns):,} columns"
    out.print(Text.assemble((line(name), "bold"), f"  {records}, {facts}"))
    for said in part.unread.lines():
        out.print(Text(line(said), "yellow"))
    if part.columns:
        out.print(_columns(part, narrow=out.width < _NARROW))
    if part.balance:
        out.print(Text(f"\nclasses of {line(part.label)}", "bold"))
        out.print(_classes(part))
    if part.examples:
        out.print(Text("\nexamples", "bold"))
        for example in part.examples:
            out.print(_example(example.record, example.values))


def _columns(part: PartProfile, *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    places = [at for at in range(len(_HEADS)) if not narrow or at not in _LEFT_OUT]
    for at in places:
        table.add_column(
            Text(_HEADS[at]),
            justify="right" if at in _FIGURES else "left",
            no_wrap=_HEADS[at] != "VALUES",  # the one to give way if all are too wide
            max_width=_NARROW // 6 if narrow and at < _FIGURES[0] else None,
        )
    for found in part.columns:
        row = list(_row(found))
        table.add_row(*(Text(row[at]) for at in places))
    return table


def _row(column: ColumnProfile) -> Iterator[str]:
    yield cut(line(column.name), _NAME)
    yield cut(line(column.type), _TYPE)
    yield share(column.nothing, column.records) if column.nothing else "–"
    yield told(column.distinct) if column.distinct is not None else "–"
    figures = column.lengths or column.numbers
    if column.kind == "text" and column.is_category:
        yield from ("", "", "", "", _values(column))
    elif figures is None:
        yield from (column.span[0], "", "", column.span[1], "") if column.span else [""] * 5
    else:
        yield number(figures.min)
        yield ("" if figures.exact else "≈ ") + number(figures.quantiles[50])
        yield number(figures.mean)
        yield number(figures.max)
        yield f"{_spark(figures)} {column.unit}".rstrip()


def _values(column: ColumnProfile) -> str:
    """The most frequent values."""
    most = top(column.counts or {}, _VALUES)
    words = [f"{cut(line(value), _VALUE)} {share(count, column.present)}" for value, count in most]
    return ", ".join(words) + (", …" if len(column.counts or {}) > _VALUES else "")


def _spark(figures: Figures) -> str:
    """A histogram on one line."""
    counts = figures.histogram.counts
    step = -(-len(counts) // _BINS)
    groups = [counts[start : start + step] for start in range(0, len(counts), step)]
    bars = [sum(group) / len(group) for group in groups]
    highest = max(bars) or 1
    return "".join(
        " " if not bar else _BARS[min(len(_BARS) - 1, int(len(_BARS) * bar / highest))]
        for bar in bars
    )


def _classes(part: PartProfile) -> Table:
    counts = part.balance or {}
    table = Table.grid(padding=(0, 2))
    most = max(counts.values(), default=1)
    for value, count in list(counts.items())[:_CLASSES]:
        bar = "█" * max(1, round(_WIDE * count / most))
        name = cut(line(value), _NAME)
        table.add_row(*map(_text, (name, f"{count:,}", share(count, part.records), bar)))
    table.columns[1].justify = table.columns[2].justify = "right"
    more = len(counts) - _CLASSES
    if more > 0:
        rest = sum(list(counts.values())[_CLASSES:])
        table.add_row(*map(_text, (f"… {more:,} more", f"{rest:,}", share(rest, part.records), "")))
    return table


def _example(record: int, values: dict[str, Any]) -> Text:
    found = Text(f"{record:>8,}", "dim")
    for name, value in values.items():
        found.append(f"  {line(name)} ", "dim")
        found.append(cut(line(value), 120), "default")
    return found


def _estimated(column: ColumnProfile) -> bool:
    figures = (column.numbers, column.lengths)
    guessed = column.distinct is not None and not column.distinct.exact
    return guessed or any(found is not None and not found.exact for found in figures)


def _text(value: str) -> Text:
    """As it is: square brackets are no markup."""
    return Text(value)
