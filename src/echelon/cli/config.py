"""`echelon config`: the schema of a job file, and one job with all defaults filled in."""

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

    job = Job.model_json_schema()
    job["properties"]["model"] = models.schema()
    job["properties"]["strategy"]["enum"] = strategy.names()
    job["properties"]["task"]["anyOf"] = [
        {"enum": list(task.NAMES)},
        {"pattern": r"\.py:\w+$"},
    ]
    print(json.dumps(job, indent=2))


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
