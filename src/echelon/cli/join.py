"""`echelon join`: one more member for a run that is under way."""

from __future__ import annotations

from typing import Annotated

import typer

from echelon.cli.interrupt import INTERRUPTED
from echelon.core.errors import Left


def join(
    run: Annotated[
        str,
        typer.Argument(
            metavar="URL|FOLDER",
            help="The run's join string (echelon://HOST:PORT/KEY), or its folder on this machine.",
        ),
    ],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Help with a run that is under way: this process becomes one of its members."""
    from echelon.cluster import joining  # torch is imported only when there is work for it
    from echelon.track import progress

    try:
        result = joining.join(run, observers=[progress(quiet=quiet)])
    except Left as error:
        print(f"{error}; the run goes on")
        raise typer.Exit(INTERRUPTED) from None
    print(f"{result.reason}; {result.steps:,} steps of the run")
