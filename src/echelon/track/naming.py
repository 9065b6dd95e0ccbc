"""Names and folders of runs."""

from __future__ import annotations

import re
from pathlib import Path


def slug(name: str) -> str:
    """A name that is safe as a folder, on any system and in any shell."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:64]
    return plain or "run"


def new_folder(folder: Path, name: str, *, above: int) -> tuple[str, int]:
    """Make the folder of the next run of this name: (id, number).

    Making it is what claims the number, so it is unique even without a store, and a folder that
    outlived its store is never taken again.
    """
    number = max(above, *_taken(folder, name)) + 1
    while True:
        run = f"{name}-{number:04d}"
        try:
            (folder / run).mkdir(parents=True)
            return run, number
        except FileExistsError:
            number += 1


def _taken(folder: Path, name: str) -> list[int]:
    ends = (entry.name.removeprefix(f"{name}-") for entry in folder.glob(f"{name}-*"))
    return [0, *(int(end) for end in ends if end.isdecimal())]
