"""Save checkpoints in the background: training waits for a copy in memory, not for the disk.

    training   ──┤ copy ├──── continues ───────────────┤ copy ├──── …
    writer              └─ finite? ─ write ─ rename ─ sweep ┘ └─ …

There is one snapshot, and one write at a time, in the order of the calls. A second snapshot would
help only until the disk is one checkpoint further behind, and would cost the memory of another
state.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.checkpoint.files import divided, first_non_finite_in_files, in_bytes
from echelon.checkpoint.state import Flat, flatten
from echelon.checkpoint.store import Shelf
from echelon.core.errors import CheckpointError, NonFiniteError, PeerError


class Writer:
    """Saves checkpoints to a `Shelf` from a thread of its own. Only one thread may call it.

    A full disk in the middle of a run is only reported through `notice`. An error that the run
    cannot survive is raised by the next call: values under the path `finite` that are not finite,
    or a folder that cannot be written to at all.
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        notice: Callable[[str], None] | None = None,
        finite: str = "strategy/model/",
        allowed: Callable[[int], bool | None] = lambda _version: True,
    ) -> None:
        """`allowed` returns whether a version may be written; None: not decided yet."""
        self.saved = 0
        """The last version that is complete on disk."""
        self._shelf = shelf
        self._notice = notice or (lambda _message: None)
        self._finite = finite
        self._allowed = allowed
        self._snapshot = Snapshot()
        self._held: tuple[int, Flat] | None = None
        """The version and state of the last `save`."""
        self._small = False
        """Whether there is too little memory for a copy, so that training waits for the disk."""
        self._error: Exception | None = None
        self._given_up = threading.Event()
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; abandon the current write if the run ends by Ctrl-C or exit."""
        if kind is not None and not issubclass(kind, Exception):
            self._given_up.set()
        self.close()

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._last is not None and not self._last.done()

    def prepare(self, state: Any) -> None:
        """Reserve and touch memory for states like this one, so that the first copy is fast."""
        size, pinned = needed(flatten(state))
        self._do(lambda: self._reserve(size, pinned))

    def save(self, version: int, state: Any) -> None:
        """Copy `state`, write the copy in the background. Without memory for a copy, write now."""
        flat = flatten(state)
        in_memory, in_files = divided(flat)
        self._await_disk(version)
        self.check()
        self._reserve(*needed(in_memory))
        if self._small:
            self._held = version, flat  # for `finish`, which tries again
            self._write(version, flat)
            return
        copy = Flat(self._snapshot.take(in_memory).tensors | in_files, flat.skeleton)
        self._held = version, copy
        self._do(lambda: self._write(version, copy))

    def save_now(self, version: int, state: Any) -> None:
        """Write `state` without a copy, and raise if that fails."""
        self.flush()
        self._put(version, flatten(state))

    def mark_best(self, version: int) -> None:
        """Mark a version as the best once it is on disk; do nothing if it never gets there."""
        self._do(lambda: self._mark_best(version))

    def finish(self, version: int) -> None:
        """Wait for the disk; if writing this version has failed, try once more and raise."""
        self.flush()
        if self.saved != version:
            assert self._held is not None, "nothing was saved"
            assert self._held[0] == version, f"step {version} was not saved"
            self._put(*self._held)

    def flush(self) -> None:
        """Wait until all requested work is done."""
        if self._last is not None:
            self._last.result()
        self.check()

    def check(self) -> None:
        """Raise the error of the background thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread after its current work, and free the memory of the snapshot."""
        thread, self._thread, self._last = self._thread, None, None
        if thread is not None:
            thread.shutdown()
        self._held = None
        self._snapshot.forget()

    def _do(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "echelon-checkpoint", _step_back)
        self._last = self._thread.submit(self._try, work)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except _GivenUp:
            pass
        except Exception as error:  # raised in the training thread by `check`
            self._error = error

    def _await_disk(self, version: int) -> None:
        began = time.perf_counter()
        if self._last is not None:
            self._last.result()
        waited = time.perf_counter() - began
        if waited > _LONG and self._held is not None:
            self._notice(
                f"training waited {waited:.1f} s to save step {version}: "
                f"the checkpoint of step {self._held[0]} was still being written"
            )

    def _reserve(self, size: int, pinned: bool) -> None:
        if not self._small and not self._snapshot.reserve(size, pinned, self._proceed):
            self._small = True
            self._notice(_NO_MEMORY)

    def _write(self, version: int, flat: Flat) -> None:
        """Write a checkpoint in the middle of a run; a full disk is reported and tolerated."""
        try:
            self._put(version, flat)
        except PeerError:
            return  # members regroup, and the first member of the new generation saves
        except CheckpointError as error:
            known = self._shelf.versions()
            if not known and not _is_full(error):
                raise
            before = f"with the one of step {known[-1]}" if known else "without any so far"
            self._notice(
                f"the checkpoint of step {version} could not be written: {error.__cause__}; "
                f"training goes on {before}"
            )

    def _put(self, version: int, flat: Flat) -> None:
        start = self._finite
        weights = {path: t for path, t in flat.tensors.items() if path.startswith(start)}
        in_memory, in_files = divided(Flat(weights, None))
        path = first_non_finite(in_memory.tensors.items()) or first_non_finite_in_files(in_files)
        if path:
            raise NonFiniteError(
                f"step {version}: {path.removeprefix(start)!r} is not finite; "
                f"this checkpoint is not written"
            )
        self._await_permission(version)
        self._shelf.put(version, flat, self._proceed)
        self.saved = version

    def _await_permission(self, version: int) -> None:
        while (allowed := self._allowed(version)) is None:
            self._proceed()
            time.sleep(_LOOK)
        if not allowed:
            raise PeerError(f"step {version} is not on record: its checkpoint is not written")

    def _mark_best(self, version: int) -> None:
        if version not in self._shelf.versions():
            return  # it could not be written, which was reported then
        try:
            self._shelf.mark_best(version)
        except CheckpointError as error:
            self._notice(str(error))

    def _proceed(self) -> None:
        if self._given_up.is_set():
            raise _GivenUp


class _GivenUp(Exception):
    """The run is ending at once, so the current write is abandoned."""


_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""Errors that mean a full disk, a file size limit or a quota; space may be freed later."""
_NICENESS = 5
"""Gives the writer a third of the scheduling weight of training, so it still gets its turn."""
_LONG = 0.5
"""Report a wait for the disk from this many seconds on."""
_LOOK = 0.01
"""Seconds between two questions whether a version may be written."""
_NO_MEMORY = "checkpoints are written while training waits: there is no memory for a copy"


def _is_full(error: CheckpointError) -> bool:
    """Return whether the disk is full. That may pass, unlike missing permissions."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL


def _step_back() -> None:
    """Lower the priority of the calling thread, so that training goes first on a busy machine."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


# The copy in memory

_PAGE, _ALIGNMENT = 4096, 64
_PIECE = 1 << 24
_WORTH_THREADS, _MOST_THREADS = 1 << 23, 8
_SPARE = 1 << 28
"""Bytes of memory that a snapshot leaves to other programs."""


class Snapshot:
    """A copy of one state in memory, from which it is written while training goes on.

    Training waits only for the copy. Copying into memory that was never touched takes six times as
    long as into memory that was, so it is reserved and touched beforehand, and used again for each
    copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int, pinned: bool, proceed: Callable[[], None]) -> bool:
        """Reserve and touch `size` bytes; return False if there is not enough memory.

        `proceed` is called between pieces, and may raise to give up.
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
        """Return a copy, valid until the next one is taken. Uses as many threads as training."""
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
        """Free the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _slots(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a part of the memory for each tensor, in the tensor's own memory order."""
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
    """Return how many bytes a snapshot takes, and whether they should be pinned for a GPU."""
    size = sum(_aligned(tensor.nbytes) for tensor in flat.tensors.values())
    return size, any(tensor.is_cuda for tensor in flat.tensors.values())


def available_memory() -> int:
    """Return how many bytes are available without swapping; 2**62 if the system does not say."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text(encoding="ascii").splitlines() if meminfo.is_file() else []
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else 1 << 62


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is one contiguous piece of CPU memory, in any order of dimensions."""
    return tensor.device.type == "cpu" and tensor.permute(by_stride(tensor)).is_contiguous()


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]], threads: int) -> None:
    """Copy tensors in pieces; each thread takes the next piece that is left.

    NumPy copies like `memcpy`. torch reads memory that it is about to overwrite, and waits for all
    of its threads after each tensor.
    """
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


Copy = tuple[NDArray[np.uint8], NDArray[np.uint8]]


def _pieces(slot: Tensor, tensor: Tensor) -> Iterator[Copy]:
    order = by_stride(tensor)
    to, source = in_bytes(slot.permute(order)).numpy(), in_bytes(tensor.permute(order)).numpy()
    for start in range(0, len(source), _PIECE):
        yield to[start : start + _PIECE], source[start : start + _PIECE]


def _copy(left: Iterator[Copy]) -> None:
    for to, source in left:
        np.copyto(to, source)


def by_stride(tensor: Tensor) -> list[int]:
    """Return the dimensions in their order in memory, the largest stride first."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda at: -strides[at])


# Values that are not finite

_VALUES_PER_CHECK = 1 << 15
"""Values checked at a time: they stay in the cache, and torch starts no threads for so few."""
_NUMPY_CHECKS = (torch.float64, torch.float32)


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first CPU tensor with a NaN or an infinity; None if all are finite.

    Uses the calling thread only; `torch.isfinite` would start as many threads as training has.
    """
    for name, tensor in named:
        if tensor.is_floating_point() and not all(
            map(_is_finite, _row(tensor).split(_VALUES_PER_CHECK))
        ):
            return name
    return None


def _row(tensor: Tensor) -> Tensor:
    """Return all values as one row, in their order in memory, which costs no copy."""
    return tensor.detach().permute(by_stride(tensor)).reshape(-1)


def _is_finite(values: Tensor) -> bool:
    if values.dtype in _NUMPY_CHECKS:
        return bool(np.isfinite(values.numpy()).all())
    return bool(torch.isfinite(values.float()).all())
