"""CheckpointStore: last few and best, torn ones skipped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from echelon.checkpoint.state import (
    Flat,
    divided,
    flatten,
    put,
    size_of,
    take,
    unflatten,
    write_tensors,
)
from echelon.core.errors import CheckpointError, RunError, unknown
from echelon.core.files import crc32_file, fsync, replace_folder, write_atomic

# --- shelf ---
# The checkpoints of a run: the last few and the best.

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
        try:
            write_atomic(self.folder / _BEST, str(version))
        except OSError as error:
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


# --- files ---
# One cut on disk: a folder that is either whole or not there.
#
#     .writing-<name>-<pid>/      tensors.safetensors, state.json, manifest.json (last), all
# synced;                                 spooled-0.bin, …: tensors that lay in files before
# → renamed to <name>/      the rename is the commit
#
# A torn or corrupt cut is noticed by its checksums when it is read.

FORMAT = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_WRITING = ".writing-"


def write_cut(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` as the folder `folder`, all of it or nothing."""
    write_flat(folder, flatten(state))


def write_flat(folder: Path, flat: Flat, proceed: Callable[[], None] = lambda: None) -> None:
    """The same for a state that was taken apart. `proceed` may raise to give up half-way."""
    aside = folder.parent / f"{_WRITING}{folder.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _check_room(aside, size_of(divided(flat)[0].tensors))
        _fill(aside, flat, proceed)
        replace_folder(aside, folder)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint {folder}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_cut(folder: Path) -> dict[str, Any]:
    """Read a cut back; anything torn, corrupt or foreign is a CheckpointError that says what."""
    verify_cut(folder)
    try:
        tensors = load_file(folder / _TENSORS)
        skeleton = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        tensors |= take(folder, manifest.get("spooled", {}))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    state = unflatten(tensors, skeleton)
    assert isinstance(state, dict)
    return state


def verify_cut(folder: Path) -> None:
    """Check every file of a cut against its manifest."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"checkpoint {folder} has format {manifest['format']}; this version reads {FORMAT}"
            )
        expected = {
            name: (entry["bytes"], entry["crc32"]) for name, entry in manifest["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} has no valid manifest: {error}") from error
    for name, (size, checksum) in expected.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {folder} is torn: {name} is missing")
        if (found := (folder / name).stat().st_size) != size:
            raise CheckpointError(
                f"checkpoint {folder} is torn: {name} has {found} of {size} bytes"
            )
        if crc32_file(folder / name) != (size, checksum):
            raise CheckpointError(f"checkpoint {folder} is corrupt: {name} fails its checksum")


def is_aside(folder: Path) -> bool:
    """Whether this is what an interrupted `write_cut` left behind."""
    return folder.name.startswith(_WRITING)


def _check_room(folder: Path, size: int) -> None:
    """Fill no disk to the brim only to find that it is too small: others write there too."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(
            errno.ENOSPC, f"No space left on device: {size:,} bytes are needed, {free:,} are free"
        )


def _fill(aside: Path, flat: Flat, proceed: Callable[[], None]) -> None:
    text = json.dumps(flat.skeleton).encode()
    (aside / _STATE).write_bytes(text)
    held, in_files = divided(flat)
    others, places = put(aside, in_files, proceed)
    written = {
        _TENSORS: write_tensors(aside / _TENSORS, held.tensors, proceed),
        _STATE: (len(text), zlib.crc32(text)),
        **others,
    }
    files = {name: {"bytes": size, "crc32": crc32} for name, (size, crc32) in written.items()}
    manifest = {"format": FORMAT, "files": files} | ({"spooled": places} if places else {})
    (aside / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*files, _MANIFEST):
        fsync(aside / name)
    fsync(aside)


# --- assemble ---

CHECKPOINTS = "checkpoints"
