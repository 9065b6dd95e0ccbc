"""`echelon data`: prepare data, look at it, and see that it is whole."""

from __future__ import annotations

import typer

from echelon.cli import data_inspect, data_prepare, data_reshard, data_verify

app = typer.Typer(help="Prepare data, look at it, check it.", no_args_is_help=True)
app.command("prepare")(data_prepare.prepare)
app.command("inspect")(data_inspect.inspect)
app.command("verify")(data_verify.verify)
app.command("reshard")(data_reshard.reshard)
