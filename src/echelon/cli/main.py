"""`echelon`: one verb per file. Exit codes: 0 done, 1 training failed, 2 user error, 130 Ctrl-C."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from echelon.cli import chaos, config, data, doctor, predict, runs, train
from echelon.cli import predict as evaluate
from echelon.cli import train as join
from echelon.cli.common import stoppable
from echelon.cluster.environment import calm_threads, calm_warnings
from echelon.core.errors import EchelonError, UserError
from echelon.core.process import keep_freed_memory


class _Verbs(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with stoppable():
            return super().invoke(ctx)


app = typer.Typer(
    name="echelon",
    cls=_Verbs,
    help="Train neural networks on the machines people really have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("join")(join.join)
app.command("chaos")(chaos.chaos)
app.command("eval")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.add_typer(runs.app, name="runs")
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run a command; a fault that was meant becomes one line and an exit code."""
    calm_threads()
    calm_warnings()
    keep_freed_memory()
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:
        sys.exit(_misused(error))
    except UserError as error:
        sys.exit(_said(error, 2))
    except EchelonError as error:
        sys.exit(_said(error, 1))


def _said(error: EchelonError, code: int) -> int:
    for note in getattr(error, "__notes__", ()):  # such as the traceback of a member
        print(note, file=sys.stderr)
    print(f"error: {error}", file=sys.stderr)
    return code


def _misused(error: typer.TyperException) -> int:
    """Of a command that was called in a way that it does not have, one line is told, too."""
    where = getattr(error, "ctx", None)
    if said := " ".join(error.format_message().removesuffix(".").split()):  # else help was given
        more = f" (see '{where.command_path} --help')" if where else ""
        print(f"error: {said[0].lower()}{said[1:]}{more}", file=sys.stderr)
    return 2
