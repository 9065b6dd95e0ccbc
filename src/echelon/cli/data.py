"""`echelon data`: prepare data as a recipe says, inspect it, verify it, reshard it.

Results go to stdout; progress goes to stderr, as a bar in a terminal and as lines elsewhere.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.common import INTERRUPTED, command, say, split_arguments
from echelon.core.errors import UserError
from echelon.core.format import (
    BARS,
    cut,
    duration,
    line,
    number,
    share,
    size,
    to_json,
    warn,
)
from echelon.data.prepare.workers import Unwatched, Watch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from echelon.data.inspect.profile import ColumnProfile, PartProfile, Profile
    from echelon.data.inspect.sketches import Figures
    from echelon.data.prepare import Prepared
    from echelon.data.shards.verify import Verified


app = typer.Typer(help="Prepare data, look at it, check it.", no_args_is_help=True)


# Prepare

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE.yaml [KEY=VALUE]...",
        show_default=False,
        help="A recipe, and settings that go before it: write.folder=elsewhere seed=1",
    ),
]


@app.command("prepare")
def prepare(
    arguments: Arguments,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", min=1, help="Processes; as many as cores if not given."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="ray|ray:HOST:PORT|ray:local",
            show_default=False,
            help="The machines of a Ray cluster that share a file system; this one if not given.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what another recipe made.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON object on stdout.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Read, clean, split and encode data into shards; started again, it goes on where it was."""
    file, overrides = split_arguments(arguments)
    if file is None:
        raise UserError("which recipe? echelon data prepare RECIPE.yaml")
    from echelon.data.prepare import load_recipe
    from echelon.data.prepare import prepare as make

    recipe = load_recipe(file, overrides)
    begun = time.monotonic()
    try:
        done = make(recipe, workers=workers, on=on, overwrite=overwrite, watch=watch(quiet=quiet))
    except KeyboardInterrupt:
        warn("stopped; the same command goes on from here")
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.monotonic() - begun
    say([to_json(_facts(done, seconds))] if as_json else _summary(done, seconds))


def _facts(done: Prepared, seconds: float) -> dict[str, object]:
    return {
        "folder": str(done.folder),
        "fresh": done.fresh,
        "seconds": round(seconds, 3),
        "counts": done.counts,
        "splits": done.facts["splits"],
    }


def _summary(done: Prepared, seconds: float) -> list[str]:
    """Return lines on the records that were read, the shards made of them, and those left out."""
    counts = done.counts
    if not done.fresh:
        return [f"{done.folder}: is up to date: same recipe, same inputs"]
    lines = [f"{done.folder}: {_count(counts['read'], 'record')} read in {duration(seconds)}"]
    for split, facts in done.facts["splits"].items():
        records, shards = _count(facts["rows"], "record", 12), _count(facts["shards"], "shard")
        lines.append(f"  {split:<6} {records} in {shards}")
    if counts["out"]:
        out = sum(counts["out"].values())
        damaged = done.facts.get("damaged", [])
        reasons = ", ".join(_reason(step, n, len(damaged)) for step, n in counts["out"].items())
        where = os.path.relpath(done.folder / "quarantine.jsonl")
        lines.append(f"  left out {out:>10,} ({reasons}); each with its reason in {where}")
        lines += _damaged(damaged)
    if counts["noted"]:
        noted = ", ".join(f"{step}: {n:,}" for step, n in counts["noted"].items())
        where = os.path.relpath(done.folder / "noted.jsonl")
        lines.append(f"  noted {sum(counts['noted'].values()):>13,} ({noted}); kept, see {where}")
    lines.append(f"next:     {command()} data inspect {done.folder}")
    return lines


def _reason(step: str, count: int, files: int) -> str:
    """Return the records that a step left out. Of a damaged file their number is not known."""
    if step != "file":
        return f"{step}: {count:,}"
    return f"{_count(files, 'empty or damaged file')}: {count:,} or more"


_SHOWN = 3
"""Number of damaged files that are named; prepared.json has all."""


def _damaged(files: list[dict[str, Any]]) -> list[str]:
    """Return a line for each of the first damaged files, and count its doubtful records."""
    lines = []
    for file in files[:_SHOWN]:
        doubt = ""
        if "doubtful" in file:
            doubt = f"; {_count(file['doubtful'], 'record')} read from it before may be wrong"
        lines.append(f"  {file['file']}: {file['reason']}{doubt}")
    return lines + ([f"  and {len(files) - _SHOWN:,} more"] if len(files) > _SHOWN else [])


def _count(count: int, what: str, width: int = 0) -> str:
    return f"{count:>{width},} {what}{'' if count == 1 else 's'}"


def watch(*, quiet: bool = False) -> Watch:
    """Return an observer of the preparation: a bar in a terminal, lines elsewhere, or nothing."""
    if quiet:
        return Unwatched()
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            return Bar(console)
    return Lines()


_SECONDS = 5.0
"""Seconds between two lines of progress in a log."""


class Lines:
    """Progress for a log file: a line for each part of the work, and one every few seconds."""

    def __init__(self) -> None:
        self._what, self._total = "", ""
        self._said = 0.0

    def began(self, what: str, total: int | None) -> None:
        self._what, self._total = what, f"/{total:,}" if total else ""
        self._said = time.monotonic()
        print(what, file=sys.stderr, flush=True)

    def advanced(self, done: int) -> None:
        if time.monotonic() - self._said >= _SECONDS:
            self._said = time.monotonic()
            print(f"{self._what}  {done:,}{self._total}", file=sys.stderr, flush=True)

    def ended(self) -> None:
        pass


class Bar:
    """Progress for a terminal: a bar for each part of the work, drawn by a thread of rich."""

    def __init__(self, console: Console) -> None:
        from rich import progress

        self._bars = progress.Progress(
            progress.TextColumn("  {task.description:<24}"),
            progress.BarColumn(complete_style="cyan"),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
        )
        self._task: progress.TaskID | None = None
        self._done = 0
        self._bars.start()

    def began(self, what: str, total: int | None) -> None:
        if self._task is not None:  # fill the bar of the part before, whose total may be unknown
            self._bars.update(self._task, total=max(1, self._done), completed=max(1, self._done))
        self._task, self._done = self._bars.add_task(what, total=total), 0

    def advanced(self, done: int) -> None:
        self._done = done
        if self._task is not None:
            self._bars.update(self._task, completed=done)

    def ended(self) -> None:
        self._bars.stop()


# Inspect


@app.command("inspect")
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A file or a folder of data.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTION=VALUE]...", help="Options of the reader: header=false."),
    ] = None,
    format: Annotated[str, typer.Option(help="Its format, where its name does not say.")] = "auto",
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The column of classes.")
    ] = None,
    examples: Annotated[int, typer.Option(min=0, max=1000, help="How many to show.")] = 5,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Schema, counts, classes, lengths, missing values and examples of any readable data."""
    settings = _parsed(options or [])
    if html is not None and not html.absolute().parent.is_dir():
        raise UserError(f"--html {html}: there is no folder {html.parent}")
    from echelon.data.inspect import inspect as look
    from echelon.data.inspect import write_html

    with _counting() as told:
        profile = look(path, format, label=label, examples=examples, told=told, **settings)
    if html is not None:
        write_html(profile, html)
    if as_json:
        say([to_json(profile.as_data())])
        return
    from echelon.track.views import console

    show(console(), profile)
    if html is not None:
        say([f"\n{html}: written"])


def _parsed(options: list[str]) -> dict[str, Any]:
    import yaml

    settings: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.isidentifier() or name in ("path", "format", "label"):
            raise UserError(f"{option!r} is no option of a reader: write NAME=VALUE")
        try:
            settings[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"{option!r}: its value is not YAML") from None
    return settings


@contextmanager
def _counting() -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of records read so far and shows it in a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("reading") as status:
        yield lambda records: status.update(f"{records:,} records")


_BINS = 20
"""Bars in the histogram of a column."""
_CLASSES = 20
"""Classes that get a row each."""
_WIDE = 30
"""Characters of the longest bar in the table of classes."""
_NAME, _TYPE = 32, 28
"""Characters of a column's name and type that are shown."""
_VALUES, _VALUE = 3, 20
"""Frequent values that are shown of a column, and characters of each."""
_HEADS = (
    *("COLUMN", "TYPE", "MISSING", "DIFFERENT", "LOWEST", "MEDIAN", "MEAN", "HIGHEST"),
    "VALUES",
)
_FIGURES = range(2, 8)  # columns of numbers, aligned to the right
_NARROW = 108
"""Terminals with fewer columns than this get a narrow table, without `_LEFT_OUT`."""
_LEFT_OUT = (4, 6)  # LOWEST and MEAN


def show(out: Console, profile: Profile) -> None:
    """Print each part of the data: its columns, classes and examples."""
    from rich.text import Text

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
    from rich.text import Text

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
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    places = [at for at in range(len(_HEADS)) if not narrow or at not in _LEFT_OUT]
    for at in places:
        table.add_column(
            Text(_HEADS[at]),
            justify="right" if at in _FIGURES else "left",
            no_wrap=_HEADS[at] != "VALUES",  # only this column wraps if the table is too wide
            max_width=_NARROW // 6 if narrow and at < _FIGURES[0] else None,
        )
    for found in part.columns:
        row = list(_row(found))
        table.add_row(*(Text(row[at]) for at in places))
    return table


def _row(column: ColumnProfile) -> Iterator[str]:
    from echelon.data.inspect.profile import told

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
    """Return the most frequent values and their shares."""
    from echelon.data.inspect.profile import top

    most = top(column.counts or {}, _VALUES)
    words = [f"{cut(line(value), _VALUE)} {share(count, column.present)}" for value, count in most]
    return ", ".join(words) + (", …" if len(column.counts or {}) > _VALUES else "")


def _spark(figures: Figures) -> str:
    """Draw a histogram on one line of text."""
    counts = figures.histogram.counts
    step = -(-len(counts) // _BINS)
    groups = [counts[start : start + step] for start in range(0, len(counts), step)]
    bars = [sum(group) / len(group) for group in groups]
    highest = max(bars) or 1
    return "".join(
        " " if not bar else BARS[min(len(BARS) - 1, int(len(BARS) * bar / highest))] for bar in bars
    )


def _classes(part: PartProfile) -> Table:
    from rich.table import Table

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
    from rich.text import Text

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
    """Return a cell that rich prints as it is: it reads square brackets in a `str` as markup."""
    from rich.text import Text

    return Text(value)


# Verify and reshard


@app.command("verify")
def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Shards, or prepared parts of them.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every damage.")] = False,
) -> None:
    """Read every shard again and compare it with its checksums; exit code 1 if one is damaged."""
    from echelon.data.shards.verify import verify as read_again

    found = read_again(folder)
    if as_json:
        say([to_json(found.as_data())])
    elif found.findings:
        print(f"damaged: {_damage(found)}", file=sys.stderr)
    else:
        say([f"{folder}: whole: {_contents(found)}"])
    raise typer.Exit(1 if found.findings else 0)


def _contents(found: Verified) -> str:

    sets = f"{found.sets} sets, " if found.sets > 1 else ""
    shards = "1 shard" if found.shards == 1 else f"{found.shards:,} shards"
    return f"{sets}{shards}, {found.records:,} records, {size(found.bytes)}"


def _damage(found: Verified) -> str:
    """Describe the first damage, and count all."""
    first, count = found.findings[0].message, len(found.findings)
    if count == 1:
        return f"{first} (the only damage in {_contents(found)})"
    files = "1 file" if found.files == 1 else f"{found.files:,} files"
    return f"{first} (the first of {count:,} damages in {files}; --json lists all)"


@app.command("reshard")
def reshard(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Shards, or prepared parts of them.")
    ],
    shards: Annotated[int, typer.Option("--shards", "-n", help="How many, of every part.")],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="Where the new ones go.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is there, all at once at the end.")
    ] = False,
) -> None:
    """Write the same records, in the same order, as another number of shards."""
    from echelon.data.shards.reshard import reshard as write_anew

    if to is None and not overwrite:
        raise UserError(f"say where the new shards go (--to), or --overwrite to replace {folder}")
    made = write_anew(folder, shards, to, overwrite=overwrite)
    records = sum(manifest.rows for manifest in made.values())
    sets = f"{len(made)} sets of " if len(made) > 1 else ""
    count = "1 shard" if shards == 1 else f"{shards:,} shards"
    total = size(sum(manifest.bytes for manifest in made.values()))
    say([f"{to or folder}: {sets}{count}, {records:,} records, {total}"])
