"""The checkpoints of a run: the last few and the best."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.checkpoint.files import is_aside, read_cut, write_flat
from echelon.checkpoint.tree import Flat, flatten
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
        ends = (entry.name.removeprefix(_STEP) for entry in self.folder.glob(f"{_STEP}*"))
        return sorted(int(end) for end in ends if end.isdecimal())

    def best(self) -> int | None:
        """The version marked as the best one."""
        try:
            version = int((self.folder / _BEST).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return version if self._at(version).exists() else None

    def save(self, version: int, state: dict[str, Any]) -> Path:
        """Write a cut, then let go of the oldest, and of any from a future that is no more."""
        return self.put(version, flatten(state))

    def put(self, version: int, flat: Flat, proceed: Callable[[], None] = lambda: None) -> Path:
        """The same for a state that was taken apart; `proceed` may raise to give up half-way."""
        path = self._at(version)
        write_flat(path, flat, proceed)
        self._sweep(version)
        return path

    def mark_best(self, version: int) -> None:
        """Remember a saved version as the best."""
        aside = self.folder / f".{_BEST}"
        try:
            aside.write_text(str(version), encoding="ascii")
            aside.replace(self.folder / _BEST)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise CheckpointError(f"cannot mark step {version} as the best: {error}") from error
        self._sweep(version)

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

    def _sweep(self, newest: int) -> None:
        """A run that went back to an older cut leaves broken or outdated newer ones behind."""
        kept = [version for version in self.versions() if version <= newest][-self._keep :]
        for version in self.versions():
            if version not in kept and version != self.best():
                self._remove(self._at(version))
        for left_behind in filter(is_aside, self.folder.iterdir()):
            shutil.rmtree(left_behind, ignore_errors=True)

    def _remove(self, cut: Path) -> None:
        """One that cannot be removed takes room, but is in nobody's way."""
        try:
            shutil.rmtree(cut)
        except OSError as error:
            self._notice(f"the old checkpoint {cut} could not be removed: {error}")
