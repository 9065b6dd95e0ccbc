"""Folders of shards: one set, or the parts of a prepared data set side by side."""

from __future__ import annotations

from pathlib import Path

from echelon.core.errors import DataError
from echelon.data.shards.manifest import MANIFEST

USUAL = ("train", "valid", "test")


def shard_sets(folder: Path) -> dict[str, Path]:
    """The sets at a folder by name: itself, called "", or the folders in it that are sets."""
    if not folder.exists():
        raise DataError(f"{folder}: there is no such folder")
    if not folder.is_dir():
        raise DataError(f"{folder}: is a file, not a folder of shards")
    if (folder / MANIFEST).exists():
        return {"": folder}
    found = {path.parent.name: path.parent for path in folder.glob(f"[!.]*/{MANIFEST}")}
    if not found:
        raise DataError(
            f"{folder}: not a folder of shards: neither it nor a folder in it has a {MANIFEST}"
        )
    return {name: found[name] for name in sorted(found, key=_place)}


def _place(name: str) -> tuple[int, str]:
    return (USUAL.index(name) if name in USUAL else len(USUAL), name)
