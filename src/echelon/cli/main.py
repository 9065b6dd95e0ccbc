"""`echelon`: one verb per file. Exit codes: 0 done, 1 training failed, 2 user error."""

from __future__ import annotations

import sys
import traceback

import click
import typer

from echelon.cli import config, doctor, evaluate, predict, runs, train
from echelon.core.errors import EchelonError, UserError

INTERRUPTED = 130

app = typer.Typer(
    name="echelon",
    help="Train neural networks on the machines people really have.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("eval")(evaluate.evaluate)
app.command("predict")(predict.predict)
app.add_typer(runs.app, name="runs")
app.add_typer(config.app, name="config")
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run a command and turn every outcome into an exit code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    try:
        code = app(arguments, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except UserError as error:
        return _say(error, 2)
    except EchelonError as error:
        return _say(error, 1)
    except (KeyboardInterrupt, click.Abort):
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return code if isinstance(code, int) else 0


def _say(error: EchelonError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
