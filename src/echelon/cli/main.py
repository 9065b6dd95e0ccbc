"""The command line `echelon`: its commands, and how errors become exit codes.

    0 done      1 training failed      2 user error      130 Ctrl-C

Each file of this folder has the commands on one subject and is a thin layer: it reads arguments,
calls the package that does the work, and prints the result. Heavy imports, such as torch, are made
inside the commands, so that `--help` and errors in arguments come at once.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from echelon.cli import chaos, config, data, doctor, predict, runs, train
from echelon.cli.common import stoppable
from echelon.cluster.environment import calm_threads, calm_warnings
from echelon.core.errors import EchelonError, UserError
from echelon.core.process import keep_freed_memory


class _Commands(TyperGroup):
    """Runs every command so that Ctrl-C ends it cleanly."""

    def invoke(self, ctx: Any) -> Any:
        with stoppable():
            return super().invoke(ctx)


app = typer.Typer(
    name="echelon",
    cls=_Commands,
    help="Train neural networks on the machines people really have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("join")(train.join)
app.command("chaos")(chaos.chaos)
app.command("eval")(predict.evaluate)
app.command("predict")(predict.predict)
app.add_typer(runs.app, name="runs")
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run a command; print an `EchelonError` as one line and exit with its code."""
    calm_threads()
    calm_warnings()
    keep_freed_memory()
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:
        _print_usage_error(error)
        sys.exit(2)
    except EchelonError as error:
        for note in getattr(error, "__notes__", ()):  # such as the traceback of another process
            print(note, file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _print_usage_error(error: typer.TyperException) -> None:
    """Print a wrong use of a command as one line that names the command's help."""
    context = getattr(error, "ctx", None)
    message = " ".join(error.format_message().removesuffix(".").split())
    if message:  # empty: help was printed instead
        more = f" (see '{context.command_path} --help')" if context else ""
        print(f"error: {message[0].lower()}{message[1:]}{more}", file=sys.stderr)
