"""`echelon data verify`: is every byte as it was written?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.arguments import say

if TYPE_CHECKING:
    from echelon.data.inspect.verify import Verified


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Shards, or prepared parts of them.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every damage.")] = False,
) -> None:
    """Read every shard again and compare it with its checksums; exit code 1 if one is damaged."""
    from echelon.data.inspect.verify import verify as read_again
    from echelon.track.text import to_json

    found = read_again(folder)
    if as_json:
        say([to_json(found.as_data())])
    elif found.findings:
        print(f"damaged: {_damage(found)}", file=sys.stderr)
    else:
        say([f"{folder}: whole: {_size(found)}"])
    raise typer.Exit(1 if found.findings else 0)


def _size(found: Verified) -> str:
    from echelon.core.figures import size

    sets = f"{found.sets} sets, " if found.sets > 1 else ""
    shards = "1 shard" if found.shards == 1 else f"{found.shards:,} shards"
    return f"{sets}{shards}, {found.records:,} records, {size(found.bytes)}"


def _damage(found: Verified) -> str:
    """The first damage, and how many there are in all."""
    first, count = found.findings[0].message, len(found.findings)
    if count == 1:
        return f"{first} (the only damage in {_size(found)})"
    files = "1 file" if found.files == 1 else f"{found.files:,} files"
    return f"{first} (the first of {count:,} damages in {files}; --json lists all)"
