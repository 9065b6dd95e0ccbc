"""The checkpoints of a run: the last few and the best."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.checkpoint.files import is_aside, read_cut, write_cut
from echelon.core.errors import CheckpointError, RunError, unknown

_STEP, _BEST = "step-", "best"


class Shelf:
    """Saves cuts by version, keeps `keep` of them beside the best, loads the newest whole one."""

    def __init__(
        self, folder: Path, *, keep: int = 2, notice: Callable[[str], None] | None = None
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._notice = notice or (lambda _message: None)

    def versions(self) -> list[int]:
        """Versions there is a cut of, oldest first."""
        names = (entry.name for entry in self.folder.glob(f"{_STEP}*"))
        return sorted(int(name.removeprefix(_STEP)) for name in names)

    def best(self) -> int | None:
        """The version marked as the best one."""
        try:
            version = int((self.folder / _BEST).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None
        return version if self._at(version).exists() else None

    def save(self, version: int, state: dict[str, Any], *, best: bool = False) -> Path:
        """Write a cut, mark it if it is the best, then let go of the oldest."""
        path = self._at(version)
        write_cut(path, state)
        if best:
            aside = self.folder / f".{_BEST}"
            aside.write_text(str(version), encoding="ascii")
            aside.replace(self.folder / _BEST)
        self._sweep()
        return path

    def load(self, which: str = "last") -> dict[str, Any]:
        """`last` (the newest that is whole), `best`, or a version."""
        if which == "last":
            return self._newest()
        best = self.best()
        if which == _BEST and best is not None:
            return read_cut(self._at(best))
        if which.isdigit() and int(which) in self.versions():
            return read_cut(self._at(int(which)))
        known = ["last", *([_BEST] if best is not None else []), *map(str, self.versions())]
        raise RunError(unknown("checkpoint", which, known))

    def _newest(self) -> dict[str, Any]:
        versions = self.versions()
        for version in reversed(versions):
            try:
                return read_cut(self._at(version))
            except CheckpointError as error:
                self._notice(f"{error}; trying the one before it")
        raise RunError(
            f"{self.folder} has no whole checkpoint ({len(versions)} tried): start the run anew"
        )

    def _at(self, version: int) -> Path:
        return self.folder / f"{_STEP}{version:010d}"

    def _sweep(self) -> None:
        for version in self.versions()[: -self._keep]:
            if version != self.best():
                shutil.rmtree(self._at(version))
        for left_behind in filter(is_aside, self.folder.iterdir()):
            shutil.rmtree(left_behind, ignore_errors=True)
