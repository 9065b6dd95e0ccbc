"""Tensors of a state that lie in files already: those files become part of the cut as they are.

They are never held in memory: not to be copied, nor to be looked at, nor to be read again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.checkpoint.tensors import PIECE
from echelon.checkpoint.tree import Flat
from echelon.core.errors import CheckpointError
from echelon.core.spool import file_of

_NAME = "spooled-{}.bin"
_KINDS = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32}

Written = dict[str, tuple[int, int]]
"""Size and checksum of files, by name."""


def divided(flat: Flat) -> tuple[Flat, dict[str, Tensor]]:
    """What is in memory, and what is in files."""
    files = {path: value for path, value in flat.tensors.items() if file_of(value) is not None}
    rest = {path: value for path, value in flat.tensors.items() if path not in files}
    return Flat(rest, flat.skeleton), files


def first_non_finite(named: Mapping[str, Tensor]) -> str | None:
    """As `finite.first_non_finite`, a piece of the file at a time."""
    for name, tensor in named.items():
        if tensor.is_floating_point() and not all(
            np.isfinite(part).all() for part in _read(tensor)
        ):
            return name
    return None


def put(
    folder: Path, tensors: Mapping[str, Tensor], proceed: Callable[[], None]
) -> tuple[Written, dict[str, Any]]:
    """Files that hold these tensors, in a folder: what was written, and what is where."""
    files: dict[Path, str] = {}
    written: Written = {}
    places: dict[str, Any] = {}
    for path, tensor in tensors.items():
        source = file_of(tensor)
        assert source is not None, f"{path} is in no file"
        if source not in files:
            files[source] = _NAME.format(len(files))
            _link(source, folder / files[source], tensor)
            written[files[source]] = _sum(folder / files[source], proceed)
        places[path] = {
            "file": files[source],
            "offset": _offset(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
    return written, places


def take(folder: Path, places: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of a cut, read from its files when they are looked at."""
    whole: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    for path, place in places.items():
        match place:
            case {
                "file": str(name),
                "offset": int(start),
                "dtype": str(kind),
                "shape": list(shape),
            } if kind in _KINDS and (folder / name).parent == folder:
                if name not in whole:
                    whole[name] = _mapped(folder / name)
                size = _KINDS[kind].itemsize * int(np.prod(shape))
                part = whole[name][start : start + size]
                found[path] = part.view(_KINDS[kind]).view(shape)
            case _:
                raise CheckpointError(f"checkpoint {folder} has no valid place for {path!r}")
    return found


def _mapped(file: Path) -> Tensor:
    size = file.stat().st_size
    return torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


def _read(tensor: Tensor) -> Iterator[NDArray[Any]]:
    kind = np.dtype(str(tensor.dtype).removeprefix("torch."))
    count, left = PIECE // kind.itemsize, tensor.numel()
    file = file_of(tensor)
    if file is None or not file.is_file():  # its name is gone, what is in it is not
        yield from (piece.numpy() for piece in tensor.reshape(-1).split(count))
        return
    with file.open("rb") as opened:
        opened.seek(_offset(tensor))
        while left:
            part = np.fromfile(opened, kind, min(left, count))
            left -= len(part)
            yield part


def _link(source: Path, to: Path, tensor: Tensor) -> None:
    """Another name for the same file; or else, as on another disk, a copy of it."""
    try:
        os.link(source, to)
    except OSError:
        storage = tensor.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        with to.open("wb") as file:
            for piece in memory.split(PIECE):
                file.write(piece.numpy().data)


def _sum(file: Path, proceed: Callable[[], None]) -> tuple[int, int]:
    size = checksum = 0
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            proceed()
            checksum = zlib.crc32(piece, checksum)
            size += len(piece)
    return size, checksum
