"""What the verbs have in common on the command line."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from echelon.core.errors import UserError


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """At most one job file, and any number of `key=value`."""
    files = [text for text in arguments if "=" not in text]
    overrides = [text for text in arguments if "=" in text]
    if len(files) > 1:
        raise UserError(f"one job file at a time, not {len(files)}: {', '.join(files)}")
    return (Path(files[0]) if files else None), overrides


def command() -> str:
    """How Echelon was called, for hints that can be copied: `echelon`, or the path to it."""
    here = Path(sys.argv[0])
    if here.name != "echelon":
        return "python -m echelon"
    found = shutil.which("echelon")
    if found is not None and Path(found).resolve() == here.resolve():
        return "echelon"
    return str(here)


def say(lines: Iterable[str]) -> None:
    """Print, and be sure that it went out: a full disk is said in one line."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough: that is no mistake
        raise
    except OSError as error:
        _drop_stdout()
        raise UserError(f"the output cannot be written: {error.strerror}") from None


def _drop_stdout() -> None:
    """What is still in the buffer would fail once more when Python ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
