"""`echelon data prepare`: from raw files to shards, as a recipe says."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.arguments import command, say, split_arguments
from echelon.cli.interrupt import INTERRUPTED
from echelon.core.errors import UserError

if TYPE_CHECKING:
    from echelon.data.prepare import Prepared

_SHOWN = 3
"""Damaged files that are named; all are in prepared.json."""

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="RECIPE.yaml [KEY=VALUE]...",
        show_default=False,
        help="A recipe, and settings that go before it: write.folder=elsewhere seed=1",
    ),
]


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
    from echelon.cli.data_progress import watch
    from echelon.data.prepare import load_recipe
    from echelon.data.prepare import prepare as make
    from echelon.track.text import to_json, warn

    recipe = load_recipe(file, overrides)
    begun = time.monotonic()
    try:
        done = make(recipe, workers=workers, on=on, overwrite=overwrite, watch=watch(quiet=quiet))
    except KeyboardInterrupt:
        warn("stopped; the same command goes on from here")
        raise typer.Exit(INTERRUPTED) from None
    seconds = time.monotonic() - begun
    say([to_json(_facts(done, seconds))] if as_json else _told(done, seconds))


def _facts(done: Prepared, seconds: float) -> dict[str, object]:
    return {
        "folder": str(done.folder),
        "fresh": done.fresh,
        "seconds": round(seconds, 3),
        "counts": done.counts,
        "splits": done.facts["splits"],
    }


def _told(done: Prepared, seconds: float) -> list[str]:
    """What was made of what, what was left out and where it is."""
    from echelon.track.text import duration

    counts = done.counts
    if not done.fresh:
        return [f"{done.folder}: is up to date: same recipe, same inputs"]
    lines = [f"{done.folder}: {_some(counts['read'], 'record')} read in {duration(seconds)}"]
    for split, facts in done.facts["splits"].items():
        records, shards = _some(facts["rows"], "record", 12), _some(facts["shards"], "shard")
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
    """Nobody knows how many records there were in what is not there."""
    if step != "file":
        return f"{step}: {count:,}"
    return f"{_some(files, 'empty or damaged file')}: {count:,} or more"


def _damaged(files: list[dict[str, Any]]) -> list[str]:
    """The first of them by name, and how much of what was read there is doubtful."""
    lines = []
    for one in files[:_SHOWN]:
        doubt = ""
        if "doubtful" in one:
            doubt = f"; {_some(one['doubtful'], 'record')} read from it before may be wrong"
        lines.append(f"  {one['file']}: {one['reason']}{doubt}")
    return lines + ([f"  and {len(files) - _SHOWN:,} more"] if len(files) > _SHOWN else [])


def _some(count: int, what: str, width: int = 0) -> str:
    return f"{count:>{width},} {what}{'' if count == 1 else 's'}"
