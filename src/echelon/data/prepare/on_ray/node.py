"""A machine of a cluster: whether what is worked on is there, and is the same."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import echelon
from echelon.data.prepare.answers import WorkerError
from echelon.data.prepare.desk import Desk

Check = Callable[[], None]
"""Raises where a node cannot take part."""


def check_here(
    version: str, desk: Desk, name: str, token: str, files: Sequence[tuple[str, int]]
) -> None:
    """The same Echelon, the mark on the desk, the files in their sizes."""
    node = f"node {socket.gethostname()}"
    if echelon.__version__ != version:
        raise WorkerError(f"{node} has Echelon {echelon.__version__}, and not {version}")
    if desk.recall(name) != token:
        raise WorkerError(
            f"{node} does not see {desk.root}: "
            f"prepare into a folder that all machines of the cluster share"
        )
    for file, size in files:
        if not _is_there(Path(file), size):
            raise WorkerError(
                f"{node} does not see {file}, or sees another one: "
                f"read from folders that all machines of the cluster share"
            )


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.is_dir() or path.stat().st_size == size
    except OSError:
        return False


def look_again(desk: Desk) -> None:
    """A network file system may remember of files that others have made since that there are none;
    that their folder is opened makes it ask."""
    with os.scandir(desk.root) as entries:
        folders = [entry.path for entry in entries if entry.is_dir()]
    for path in (str(desk.root), *folders):
        os.close(os.open(path, os.O_RDONLY))
