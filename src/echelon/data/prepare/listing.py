"""Which files a path, a pattern or a folder stands for, and which of them nobody means."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path, PurePath

from echelon.data.shards.manifest import PREPARED

Listed = tuple[str, int, str]
"""A file, its size, and what changes when it does."""
_SIGNS = "*?["


def is_pattern(path: str) -> bool:
    return any(sign in path for sign in _SIGNS)


def fixed(pattern: PurePath) -> PurePath:
    """The folder that a pattern names before it leaves anything open."""
    kept = 0
    while kept < len(pattern.parts) and not is_pattern(pattern.parts[kept]):
        kept += 1
    return type(pattern)(*pattern.parts[:kept])


def meant(inner: PurePath, prepared: Callable[[PurePath], bool]) -> bool:
    """Whether a file that was found, not named, is raw data: it is not hidden, and no preparation
    has written it. What is read and what is written may lie in one folder.

    `inner` is its path below the folder that was named.
    """
    hidden = any(part.startswith(".") and part != ".." for part in inner.parts)
    folders = list(inner.parents)[:-1]
    return not hidden and not any(prepared(folder) for folder in folders)


def local(path: str) -> Iterator[Listed]:
    """The files here, in the order of their names."""
    here = Path(path).expanduser()
    if here.is_dir():
        names: Iterable[Path] = _found(here, here.rglob("*"))
    elif here.exists():
        names = [here]
    else:
        matches = glob.glob(str(here), recursive=True)  # noqa: PTH207 (`..`, roots)
        names = _found(Path(fixed(here)), map(Path, matches))
    for name in sorted(names):
        about = name.stat()
        yield str(name), about.st_size, str(about.st_mtime_ns)


def _found(base: Path, names: Iterable[Path]) -> Iterator[Path]:
    @cache
    def prepared(folder: PurePath) -> bool:
        return (base / folder / PREPARED).is_file()

    return (name for name in names if name.is_file() and meant(name.relative_to(base), prepared))
