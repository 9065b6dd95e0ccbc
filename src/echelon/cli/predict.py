"""`echelon predict`: what a trained run says of new data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from echelon.cli.evaluate import Checkpoint, Folder
from echelon.core.errors import UserError


def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or `last`.")],
    data: Annotated[
        Path | None, typer.Argument(metavar="[DATA]", help="A file like the one trained on.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="For a language model: the text to go on from.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens to write.")] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write here instead of to stdout.")] = None,
    checkpoint: Checkpoint = "last",
    folder: Folder = "runs",
) -> None:
    """Print one JSON object per sample, in the order of the data; or a language model's text."""
    if (data is None) == (prompt is None):
        raise UserError("give either a file of data or --prompt")
    if prompt is not None:
        _tell(folder, run, checkpoint, prompt, length, temperature, seed)
        return
    assert data is not None
    if not data.exists():
        raise UserError(f"{data}: there is no such file")
    if out is None:
        _write(sys.stdout, folder, run, checkpoint, data)
        return
    aside = out.with_name(f".{out.name}.part")
    try:
        with aside.open("w", encoding="utf-8") as file:
            _write(file, folder, run, checkpoint, data)
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)


def _write(file: TextIO, folder: str, run: str, checkpoint: str, data: Path) -> None:
    from echelon.cli.reopening import reopen
    from echelon.loop.inference import predict_run

    known, task = reopen(folder, run, [f"data.path={data}"])
    for row in predict_run(known, task, checkpoint):
        print(json.dumps(row, ensure_ascii=False), file=file)


def _tell(
    folder: str,
    run: str,
    checkpoint: str,
    prompt: str,
    length: int,
    temperature: float,
    seed: int,
) -> None:
    from echelon.cli.reopening import reopen
    from echelon.loop.inference import trained_model
    from echelon.task.generate import Writer

    known, task = reopen(folder, run, [])
    writer = Writer(trained_model(known, task, checkpoint), known.fitted)
    print(writer.go_on(prompt, length, temperature=temperature, seed=seed))
