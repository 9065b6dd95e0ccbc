"""One checkpoint on disk: a folder that is either complete or not there.

    .writing-NAME-PID/      state.json, tensors.safetensors; spooled-0.bin, … (tensors that were in
                            files already); manifest.json with sizes and checksums of all, last
    ─▶ every file synced
    ─▶ renamed to NAME/     the rename is the commit

Reading compares every file with the manifest, so a torn or corrupt checkpoint is detected.

Tensors in memory become one safetensors file, written piece by piece:

    8 bytes: length of the header ─ header: JSON, padded to 8 bytes ─ the tensors, one after another

`safetensors.torch.save_file` writes the same file, but the checksum would need the file to be read
again. Writing and computing the checksum release the GIL, so training goes on meanwhile. Reading
uses the safetensors library.

Tensors that lie in files, such as embedding tables larger than memory, are never held in memory:
their files become part of the checkpoint, by a second name (hard link) where possible.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echelon.checkpoint.state import Flat, flatten, unflatten
from echelon.core.errors import CheckpointError
from echelon.core.files import crc32_file, file_of, fsync, replace_folder

FORMAT = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_WRITING = ".writing-"


def write_cut(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` as a checkpoint in `folder`, completely or not at all."""
    write_flat(folder, flatten(state))


def write_flat(folder: Path, flat: Flat, proceed: Callable[[], None] = lambda: None) -> None:
    """Write a flattened state. `proceed` is called between pieces, and may raise to give up."""
    aside = folder.parent / f"{_WRITING}{folder.name}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        in_memory, _ = divided(flat)
        _check_room(aside, sum(tensor.nbytes for tensor in in_memory.tensors.values()))
        _fill(aside, flat, proceed)
        replace_folder(aside, folder)
    except OSError as error:
        raise CheckpointError(f"cannot write checkpoint {folder}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_cut(folder: Path) -> dict[str, Any]:
    """Read a checkpoint; raise a CheckpointError that names the damage if it is not intact."""
    verify_cut(folder)
    try:
        tensors = load_file(folder / _TENSORS)
        skeleton = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        tensors |= _map_files(folder, manifest.get("spooled", {}))
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read: {error}") from error
    state = unflatten(tensors, skeleton)
    assert isinstance(state, dict)
    return state


def verify_cut(folder: Path) -> None:
    """Compare every file of a checkpoint with its manifest."""
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
    """Return whether an interrupted `write_cut` left this folder behind."""
    return folder.name.startswith(_WRITING)


def _check_room(folder: Path, size: int) -> None:
    """Fail before writing if the disk is too small: filling it would disturb other programs."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(
            errno.ENOSPC, f"No space left on device: {size:,} bytes are needed, {free:,} are free"
        )


def _fill(aside: Path, flat: Flat, proceed: Callable[[], None]) -> None:
    text = json.dumps(flat.skeleton).encode()
    (aside / _STATE).write_bytes(text)
    in_memory, in_files = divided(flat)
    others, places = _put_files(aside, in_files, proceed)
    written = {
        _TENSORS: write_tensors(aside / _TENSORS, in_memory.tensors, proceed),
        _STATE: (len(text), zlib.crc32(text)),
        **others,
    }
    files = {name: {"bytes": size, "crc32": crc32} for name, (size, crc32) in written.items()}
    manifest = {"format": FORMAT, "files": files} | ({"spooled": places} if places else {})
    (aside / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*files, _MANIFEST):
        fsync(aside / name)
    fsync(aside)


def divided(flat: Flat) -> tuple[Flat, dict[str, Tensor]]:
    """Divide a state into the part in memory and the tensors that lie in files."""
    files = {path: value for path, value in flat.tensors.items() if file_of(value) is not None}
    in_memory = {path: value for path, value in flat.tensors.items() if path not in files}
    return Flat(in_memory, flat.skeleton), files


# Tensors in memory: one safetensors file

PIECE = 1 << 22
"""Bytes that are written, read or checked at a time."""
_ALIGNMENT = 8
"""The header is padded to a multiple of this, as by the writer of safetensors itself."""
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], proceed: Callable[[], None]
) -> tuple[int, int]:
    """Write a safetensors file and return its size and crc32.

    `proceed` is called between pieces, and may raise to give up.
    """
    size, checksum = 0, 0
    with path.open("wb") as file:
        for piece in _pieces(tensors):
            proceed()
            checksum = zlib.crc32(piece, checksum)
            size += file.write(piece)
    return size, checksum


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    # Large elements first, so that every tensor lies at a multiple of its own element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    yield _header({name: tensors[name] for name in names})
    for name in names:
        whole = in_bytes(tensors[name].cpu().contiguous()).numpy().data
        for start in range(0, len(whole), PIECE):
            yield whole[start : start + PIECE]


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries, start = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _SAFETENSORS_DTYPES:
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}, which cannot be saved")
        stop = start + tensor.nbytes
        entries[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def in_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


# Tensors in files

_NAME = "spooled-{}.bin"
_FILE_DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32}
Written = dict[str, tuple[int, int]]
"""File name → (size, crc32)."""


def _put_files(
    folder: Path, tensors: Mapping[str, Tensor], proceed: Callable[[], None]
) -> tuple[Written, dict[str, Any]]:
    """Link or copy the files of these tensors into `folder`.

    Returns size and checksum of each file, and the place of each tensor in them.
    """
    files: dict[Path, str] = {}
    written: Written = {}
    places: dict[str, Any] = {}
    for path, tensor in tensors.items():
        source = file_of(tensor)
        assert source is not None, f"{path} is not in a file"
        if source not in files:
            files[source] = _NAME.format(len(files))
            _link(source, folder / files[source], tensor)
            written[files[source]] = crc32_file(folder / files[source], proceed)
        places[path] = {
            "file": files[source],
            "offset": _offset(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
    return written, places


def _link(source: Path, to: Path, tensor: Tensor) -> None:
    """Give the file a second name; copy it where that is not possible, as on another disk."""
    try:
        os.link(source, to)
    except OSError:
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        with to.open("wb") as file:
            for piece in memory.split(PIECE):
                file.write(piece.numpy().data)


def _map_files(folder: Path, places: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors that are mapped from a checkpoint's files, and read when they are used."""
    mapped: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for path, place in places.items():
        match place:
            case {
                "file": str(name),
                "offset": int(start),
                "dtype": str(kind),
                "shape": list(shape),
            } if kind in _FILE_DTYPES and (folder / name).parent == folder:
                if name not in mapped:
                    mapped[name] = _map(folder / name)
                size = _FILE_DTYPES[kind].itemsize * int(np.prod(shape))
                part = mapped[name][start : start + size]
                tensors[path] = part.view(_FILE_DTYPES[kind]).view(shape)
            case _:
                raise CheckpointError(f"checkpoint {folder} has no valid place for {path!r}")
    return tensors


def _map(file: Path) -> Tensor:
    size = file.stat().st_size
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def first_non_finite_in_files(named: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity, reading files in pieces."""
    for name, tensor in named.items():
        if tensor.is_floating_point() and not all(
            np.isfinite(part).all() for part in _read(tensor)
        ):
            return name
    return None


def _read(tensor: Tensor) -> Iterator[NDArray[Any]]:
    kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
    count, left = PIECE // kind.itemsize, tensor.numel()
    file = file_of(tensor)
    if file is None or not file.is_file():  # deleted, but its contents are still mapped
        yield from (piece.numpy() for piece in tensor.reshape(-1).split(count))
        return
    with file.open("rb") as opened:
        opened.seek(_offset(tensor))
        while left:
            part = np.fromfile(opened, kind, min(left, count))
            left -= len(part)
            yield part
