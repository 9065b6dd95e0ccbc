"""`echelon doctor`: checks of this machine, each with its meaning for training.

The checks are in track/doctor.py. The check of bfloat16 is added here, because it is made by
`strategy`, which `track` may not import.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from echelon.track.doctor import Check

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def doctor(
    folder: Annotated[
        Path,
        typer.Option("--folder", "-f", help="Where runs will be kept.", metavar="FOLDER"),
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Check this machine and say what each finding means for training."""
    from echelon.track.doctor import check_all

    checks = [*check_all(folder), _half_precision()]
    failed = any(check.verdict == "fail" for check in checks)
    if as_json:
        _print_json(checks, failed)
    else:
        _print_table(checks)
    raise typer.Exit(1 if failed else 0)


def _half_precision() -> Check:
    from echelon.strategy.half_precision import state_of_bf16
    from echelon.track.doctor import Check

    state = state_of_bf16()
    meaning = {
        "works": "precision: bf16 can be used.",
        "works without AMX": "This CPU announces AMX, but it crashes; Echelon switches it off.",
        "crashes": "Use precision: fp32 on this machine.",
    }
    return Check("bf16", "warn" if state == "crashes" else "ok", state, meaning[state])


def _print_json(checks: list[Check], failed: bool) -> None:
    from echelon.core.format import to_json

    print(to_json({"ok": not failed, "checks": [check._asdict() for check in checks]}))


def _print_table(checks: list[Check]) -> None:
    from rich.table import Table
    from rich.text import Text

    from echelon.track.views import console

    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(Text(*_MARKS[check.verdict]), Text(check.name, "bold"), Text(check.figure))
        table.add_row("", "", Text(check.meaning, "dim"))
    console().print(table)
