"""What a run may not leave behind."""

from __future__ import annotations

from pathlib import Path

from echelon.cluster.joining import JOIN
from echelon.loop.assemble import CHECKPOINTS

_MEMORY = Path("/dev/shm")


def shared_memory() -> set[str]:
    """Named memory of Echelon, of whatever run. (What has no name goes with its processes.)"""
    entries = _MEMORY.iterdir() if _MEMORY.is_dir() else ()
    return {entry.name for entry in entries if "echelon" in entry.name}


def remains(folder: Path, before: set[str]) -> list[str]:
    """Of the run in `folder`, whose processes have ended."""
    found = [f"shared memory {name}" for name in sorted(shared_memory() - before)]
    files = [folder / JOIN, *(folder / CHECKPOINTS).glob(".*")]
    return found + [f"file {file}" for file in files if file.exists()]
