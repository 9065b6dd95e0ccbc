"""`echelon data inspect`: what is in a file or a folder, before anything is done with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.arguments import say
from echelon.core.errors import UserError

if TYPE_CHECKING:
    from echelon.data.inspect import Profile


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
        from echelon.track.text import to_json

        say([to_json(profile.as_data())])
        return
    _show(profile)
    if html is not None:
        say([f"\n{html}: written"])


def _show(profile: Profile) -> None:
    from echelon.cli.profile_view import show
    from echelon.track.views import console

    show(console(), profile)


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
    """How many records are done, on a terminal that shows it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("reading") as status:
        yield lambda records: status.update(f"{records:,} records")
