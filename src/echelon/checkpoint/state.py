"""Nested state ⇄ safetensors; RNG.

Named tensors as a safetensors file, written piece by piece.

    8 bytes: length of the header ─ header: JSON, padded to 8 bytes ─ the tensors, one after another

`safetensors.torch.save_file` makes the same file, but the checksum would need the file to be read
again. Reading is safetensors' own affair. Writing and the checksum leave Python to other threads.
"""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.errors import CheckpointError
from echelon.core.files import crc32_file, file_of

# --- tensors ---

PIECE = 1 << 22
_ALIGNMENT = 8
_KINDS = {
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
    """Returns size and checksum. `proceed` is called now and then, and may raise to give up."""
    size, checksum = 0, 0
    with path.open("wb") as file:
        for piece in _pieces(tensors):
            proceed()
            checksum = zlib.crc32(piece, checksum)
            size += file.write(piece)
    return size, checksum


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of all of them together."""
    return sum(tensor.nbytes for tensor in tensors.values())


def in_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)


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
        if tensor.dtype not in _KINDS:
            raise CheckpointError(f"tensor {name!r} is {tensor.dtype}, which cannot be saved")
        stop = start + tensor.nbytes
        entries[name] = {
            "dtype": _KINDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


# --- tree ---
# Nested state ⇄ a flat set of named tensors and a JSON skeleton. No pickle anywhere.

_TENSOR, _TUPLE, _INTKEYS = "$tensor", "$tuple", "$intkeys"


class Flat(NamedTuple):
    """Tensors by path, and the rest as plain JSON data that points to them."""

    tensors: dict[str, Tensor]
    skeleton: Any


def flatten(state: Any) -> Flat:
    """Take a state apart. Nothing is copied: the tensors are those of `state`.

    Tensors that are one and the same (tied weights) are stored once.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def tensor(value: Tensor, path: str) -> dict[str, str]:
        identity = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        if value.numel() and identity in seen:
            return {_TENSOR: seen[identity]}
        seen[identity] = path
        tensors[path] = value.detach()
        return {_TENSOR: path}

    def walk(value: Any, path: str) -> Any:
        match value:
            case Tensor():
                return tensor(value, path)
            case dict():
                return mapping(value, path)
            case tuple():
                return {_TUPLE: [walk(item, f"{path}/{i}") for i, item in enumerate(value)]}
            case list():
                return [walk(item, f"{path}/{i}") for i, item in enumerate(value)]
            case None | bool() | int() | float() | str():
                return value
        raise CheckpointError(
            f"state at {path or '/'} is a {type(value).__name__}: "
            f"only tensors and plain data can be saved"
        )

    def mapping(value: dict[Any, Any], path: str) -> dict[str, Any]:
        inner = {
            str(key): walk(item, f"{path}/{key}" if path else str(key))
            for key, item in value.items()
        }
        if value and all(type(key) is int for key in value):
            return {_INTKEYS: inner}
        if not all(type(key) is str and not key.startswith("$") for key in value):
            raise CheckpointError(f"state at {path or '/'} has keys that are not plain names")
        return inner

    return Flat(tensors, walk(state, ""))


def unflatten(tensors: dict[str, Tensor], skeleton: Any) -> Any:
    """The inverse of `flatten`."""
    match skeleton:
        case {"$tensor": str(path), **rest} if not rest:
            if path not in tensors:
                raise CheckpointError(f"tensor {path!r} is missing")
            return tensors[path]
        case {"$tuple": list(items), **rest} if not rest:
            return tuple(unflatten(tensors, item) for item in items)
        case {"$intkeys": dict(inner), **rest} if not rest:
            return {int(key): unflatten(tensors, item) for key, item in inner.items()}
        case dict():
            return {key: unflatten(tensors, item) for key, item in skeleton.items()}
        case list():
            return [unflatten(tensors, item) for item in skeleton]
    return skeleton


# --- spooled ---
# Tensors of a state that lie in files already: those files become part of the cut as they are.
#
# They are never held in memory: not to be copied, nor to be looked at, nor to be read again.

_NAME = "spooled-{}.bin"
_FILE_KINDS = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32}

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
            written[files[source]] = crc32_file(folder / files[source], proceed)
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
            } if kind in _FILE_KINDS and (folder / name).parent == folder:
                if name not in whole:
                    whole[name] = _mapped(folder / name)
                size = _FILE_KINDS[kind].itemsize * int(np.prod(shape))
                part = whole[name][start : start + size]
                found[path] = part.view(_FILE_KINDS[kind]).view(shape)
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


# --- randomness ---
# The random generators that a run, or a data set of the user's, may draw from.

_NumpyState: TypeAlias = tuple[str, NDArray[np.uint32], int, int, float]


def seed(number: int) -> None:
    """Start all of them alike."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def part_ways(number: int, member: int, version: int) -> None:
    """Let a member that reads other samples than the first draw other numbers than it."""
    if member > 0:
        seed(zlib.crc32(f"{number} {member} {version}".encode()))


def capture() -> dict[str, Any]:
    """Torch's generators, Python's and NumPy's global one."""
    name, keys, place, has_spare, spare = cast(_NumpyState, np.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), place, has_spare, spare),
    }


def restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, keys, place, has_spare, spare = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_spare, spare))
