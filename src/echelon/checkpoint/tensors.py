"""Named tensors as a safetensors file, written piece by piece.

    8 bytes: length of the header ─ header: JSON, padded to 8 bytes ─ the tensors, one after another

`safetensors.torch.save_file` makes the same file, but the checksum would need the file to be read
again. Reading is safetensors' own affair. Writing and the checksum leave Python to other threads.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from echelon.core.errors import CheckpointError

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
