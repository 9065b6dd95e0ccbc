"""A copy of a state in memory, from which it is written while training goes on.

Taking it is all that training waits for. Memory that was never touched takes six times as long to
copy into as memory that was, so it is reserved and touched beforehand, and used again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.checkpoint.finite import by_stride
from echelon.checkpoint.tensors import in_bytes
from echelon.checkpoint.tree import Flat

_PAGE, _ALIGNMENT = 4096, 64
_PIECE = 1 << 24
_WORTH_THREADS, _MOST_THREADS = 1 << 23, 8
_SPARE = 1 << 28
"""Bytes of memory to leave to everybody else."""
Copy = tuple[NDArray[np.uint8], NDArray[np.uint8]]


class Snapshot:
    """Memory for one state at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int, pinned: bool, proceed: Callable[[], None]) -> bool:
        """Have so much memory, touched; returns False if there is not enough of it.

        `proceed` is called now and then, and may raise to give up.
        """
        if self._memory.numel() >= size and (self._memory.is_pinned() or not pinned):
            return True
        self.forget()
        if size + _SPARE > available_memory():
            return False
        try:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        except (RuntimeError, MemoryError):
            return False
        for part in memory.split(_PIECE):
            proceed()
            part.numpy()[::_PAGE] = 0
        self._memory = memory
        return True

    def take(self, flat: Flat) -> Flat:
        """A copy, made by as many threads as training has; good until the next one is taken."""
        slots = self._slots(flat.tensors)
        pairs = [(slots[path], tensor) for path, tensor in flat.tensors.items()]
        _copy_all((pair for pair in pairs if _is_dense(pair[1])), torch.get_num_threads())
        elsewhere = [pair for pair in pairs if not _is_dense(pair[1])]
        for slot, tensor in elsewhere:
            slot.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for _, tensor in elsewhere):
            torch.cuda.synchronize()
        return Flat(slots, flat.skeleton)

    def forget(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _slots(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A place for each tensor, laid out as the tensor itself."""
        slots: dict[str, Tensor] = {}
        start = 0
        for path, tensor in tensors.items():
            order = by_stride(tensor)
            shape = [tensor.shape[at] for at in order]
            slot = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(shape)
            slots[path] = slot.permute([order.index(at) for at in range(tensor.ndim)])
            start += _aligned(tensor.nbytes)
        return slots


def needed(flat: Flat) -> tuple[int, bool]:
    """How many bytes a snapshot takes, and whether they should be pinned for a GPU."""
    size = sum(_aligned(tensor.nbytes) for tensor in flat.tensors.values())
    return size, any(tensor.is_cuda for tensor in flat.tensors.values())


def available_memory() -> int:
    """Bytes that can be had without swapping; without end where the system does not say."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.is_file() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else 1 << 62


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is one piece of this machine's memory, in whatever order of dimensions."""
    return tensor.device.type == "cpu" and tensor.permute(by_stride(tensor)).is_contiguous()


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]], threads: int) -> None:
    """Each thread takes the next piece that is left. NumPy copies as `memcpy` does, whereas torch
    reads what it is about to write over, and waits for all of its threads after each tensor."""
    copies = [copy for slot, tensor in pairs for copy in _pieces(slot, tensor)]
    left = iter(copies)
    if threads == 1 or sum(len(source) for _, source in copies) < _WORTH_THREADS:
        _copy(left)
        return
    others = min(threads, _MOST_THREADS) - 1
    with ThreadPoolExecutor(others, thread_name_prefix="echelon-snapshot") as pool:
        working = [pool.submit(_copy, left) for _ in range(others)]
        _copy(left)
        for other in working:
            other.result()


def _pieces(slot: Tensor, tensor: Tensor) -> Iterator[Copy]:
    order = by_stride(tensor)
    to, source = in_bytes(slot.permute(order)).numpy(), in_bytes(tensor.permute(order)).numpy()
    for start in range(0, len(source), _PIECE):
        yield to[start : start + _PIECE], source[start : start + _PIECE]


def _copy(left: Iterator[Copy]) -> None:
    for to, source in left:
        np.copyto(to, source)
