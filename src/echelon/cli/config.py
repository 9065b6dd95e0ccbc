"""`echelon config`: what a job may say, and what one says."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from echelon.cli.common import split_arguments

app = typer.Typer(help="Look at and check job files.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of a job, for editors and checkers."""
    from echelon import models, strategy, task
    from echelon.core.config import Job

    found = Job.model_json_schema()
    found["properties"]["model"] = models.schema()
    found["properties"]["strategy"]["enum"] = strategy.names()
    found["properties"]["task"]["anyOf"] = [
        {"enum": list(task.NAMES)},
        {"pattern": r"\.py:\w+$"},
    ]
    print(json.dumps(found, indent=2))


@app.command()
def show(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[JOB.yaml] [KEY=VALUE]...")
    ] = None,
) -> None:
    """Check a job and print it with every default filled in."""
    import yaml

    from echelon import strategy, task
    from echelon.core.config import load_job

    file, overrides = split_arguments(arguments or [])
    job = load_job(file, overrides, checks=[task.check, strategy.check]).job
    print(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")
