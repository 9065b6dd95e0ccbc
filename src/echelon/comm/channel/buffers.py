"""Tensors as the bytes they are, and bytes in chunks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from torch import Tensor

Buffer = Tensor | memoryview | bytearray | bytes
CHUNK = 1 << 20
"""Bytes after which progress is reported."""
NOTHING = memoryview(bytearray())


_WRITABLE = 0x200
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory.restype = ctypes.py_object


def view(buffer: Buffer) -> memoryview:
    """The bytes themselves, no copy. Those of a tensor live as long as the tensor does."""
    if not isinstance(buffer, Tensor):
        return memoryview(buffer).cast("B")
    if not buffer.is_contiguous() or not buffer.is_cpu:
        raise ValueError("only contiguous tensors in main memory go over the wire")
    size = buffer.numel() * buffer.element_size()
    # Any dtype, and a third of the time that the way through numpy takes.
    return _memory(buffer.data_ptr(), size, _WRITABLE) if size else NOTHING


def chunks(views: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """`size` bytes at a time of all of them together, in one piece or more."""
    gathered: list[memoryview] = []
    room = size
    for whole in views:
        at = 0
        while at < len(whole):
            piece = whole[at : at + room]
            gathered.append(piece)
            at += len(piece)
            room -= len(piece)
            if not room:
                yield gathered
                gathered, room = [], size
    if gathered:
        yield gathered


def after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of them without the first `count` bytes."""
    for at, whole in enumerate(views):
        if count < len(whole):
            return [whole[count:], *views[at + 1 :]]
        count -= len(whole)
    return []
