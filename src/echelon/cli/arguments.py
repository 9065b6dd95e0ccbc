"""What the verbs have in common on the command line."""

from __future__ import annotations

import shutil
import sys
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
