"""The checkpoints of a run: saves by version, keeps the last few and the best, loads the newest.

    checkpoints/step-0000000040/    a checkpoint (files.py)
    checkpoints/step-0000000050/
    checkpoints/best                a file with the version of the best one

If the newest checkpoint is damaged, an older one is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echelon.checkpoint.files import is_aside, read_cut, write_flat
from echelon.checkpoint.state import Flat, flatten
from echelon.core.errors import CheckpointError, RunError, unknown
from echelon.core.files import write_atomic

CHECKPOINTS = "checkpoints"
"""Name of the folder inside the folder of a run."""
_STEP, _BEST = "step-", "best"


class Shelf:
    """The checkpoints in one folder: `keep` of the latest, and the best.

    `notice` is called with messages for the user about checkpoints that are damaged or cannot be
    removed.
    """

    def __init__(
        self, folder: Path, *, keep: int = 2, notice: Callable[[str], None] | None = None
    ) -> None:
        self.folder = folder
        self._keep = keep
        self._notice = notice or (lambda _message: None)

    def versions(self) -> list[int]:
        """Return the saved versions, oldest first."""
        ends = (entry.name.removeprefix(_STEP) for entry in self.folder.glob(f"{_STEP}*"))
        return sorted(int(end) for end in ends if end.isdecimal())

    def best(self) -> int | None:
        """Return the version that is marked as the best; None if there is none."""
        try:
            version = int((self.folder / _BEST).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return version if self._at(version).exists() else None

    def save(self, version: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove the oldest ones and any of a later version."""
        return self.put(version, flatten(state))

    def put(self, version: int, flat: Flat, proceed: Callable[[], None] = lambda: None) -> Path:
        """Save a flattened state; `proceed` is called between pieces and may raise to give up."""
        path = self._at(version)
        write_flat(path, flat, proceed)
        self._sweep(version)
        return path

    def mark_best(self, version: int) -> None:
        """Mark a saved version as the best."""
        try:
            write_atomic(self.folder / _BEST, str(version))
        except OSError as error:
            raise CheckpointError(f"cannot mark step {version} as the best: {error}") from error
        self._sweep(version)

    def load(self, which: str = "last") -> dict[str, Any]:
        """Load `last` (the newest one that is intact), `best`, or a version."""
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
        """Remove checkpoints that are not to be kept, and unfinished ones.

        Versions after `newest` are removed too, except the best: the run went back to an older
        checkpoint, and newer ones are damaged or outdated.
        """
        kept = [version for version in self.versions() if version <= newest][-self._keep :]
        for version in self.versions():
            if version not in kept and version != self.best():
                self._remove(self._at(version))
        for left_behind in filter(is_aside, self.folder.iterdir()):
            shutil.rmtree(left_behind, ignore_errors=True)

    def _remove(self, cut: Path) -> None:
        """Remove a checkpoint. A failure is only reported: it costs disk space and no more."""
        try:
            shutil.rmtree(cut)
        except OSError as error:
            self._notice(f"the old checkpoint {cut} could not be removed: {error}")
