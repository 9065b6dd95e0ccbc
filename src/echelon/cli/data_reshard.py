"""`echelon data reshard`: the same records in another number of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.arguments import say
from echelon.core.errors import UserError


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
    from echelon.core.figures import size
    from echelon.data.reshard import reshard as write_anew

    if to is None and not overwrite:
        raise UserError(f"say where the new shards go (--to), or --overwrite to replace {folder}")
    made = write_anew(folder, shards, to, overwrite=overwrite)
    records = sum(manifest.rows for manifest in made.values())
    sets = f"{len(made)} sets of " if len(made) > 1 else ""
    count = "1 shard" if shards == 1 else f"{shards:,} shards"
    total = size(sum(manifest.bytes for manifest in made.values()))
    say([f"{to or folder}: {sets}{count}, {records:,} records, {total}"])
