"""One cut on disk: a folder that is either whole or not there.

    .writing-<name>-<pid>/      tensors.safetensors, state.json, manifest.json (last), all synced;
                                spooled-0.bin, …: tensors that lay in files before
      → renamed to <name>/      the rename is the commit

A torn or corrupt cut is noticed by its checksums when it is read.
"""

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

from echelon.checkpoint.spooled import divided, put, take
from echelon.checkpoint.tensors import size_of, write_tensors
from echelon.checkpoint.tree import Flat, flatten, unflatten
from echelon.core.errors import CheckpointError

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
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        _sync(folder.parent)
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
        if _crc32(folder / name) != checksum:
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
        _sync(aside / name)
    _sync(aside)


def _crc32(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
