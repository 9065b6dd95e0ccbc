"""`echelon predict`: what a trained run says of new data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.arguments import say
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
        lines: Iterable[str] = [_told(folder, run, checkpoint, prompt, length, temperature, seed)]
    else:
        assert data is not None
        lines = _predicted(folder, run, checkpoint, data)
    if out is None:
        say(lines)
    else:
        _save(lines, out)


def _save(lines: Iterable[str], out: Path) -> None:
    """All of it, or nothing at all. A device or a pipe is written to as it is."""
    if out.is_dir():
        raise UserError(f"--out {out}: is a folder, give the name of a file")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    target = out.resolve()
    plain = target.is_file() or not target.exists()
    aside = target.with_name(f".{target.name}.part") if plain else target
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
        if plain:
            aside.replace(target)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    finally:
        if plain:
            aside.unlink(missing_ok=True)


def _predicted(folder: str, run: str, checkpoint: str, data: Path) -> Iterator[str]:
    from echelon.cli.reopening import reopen_on, stored_run
    from echelon.loop.inference import predict_run
    from echelon.track.text import to_json

    if not data.exists():
        raise UserError(f"{data}: there is no such file")
    known = stored_run(folder, run)
    if known.job.task == "language_model":
        raise UserError("a language model goes on from a text: use --prompt")
    known, task = reopen_on(known, data)
    return map(to_json, predict_run(known, task, checkpoint))


def _told(
    folder: str,
    run: str,
    checkpoint: str,
    prompt: str,
    length: int,
    temperature: float,
    seed: int,
) -> str:
    from echelon.cli.reopening import reopen
    from echelon.loop.inference import trained_model
    from echelon.task.generate import Writer

    known, task = reopen(folder, run, [])
    writer = Writer(trained_model(known, task, checkpoint), known.fitted)
    return writer.go_on(prompt, length, temperature=temperature, seed=seed)
