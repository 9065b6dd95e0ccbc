"""Checkpoints in the background: training waits for the copy in memory, not for the disk.

    training   ──┤ take ├──── goes on ─────────────────┤ take ├──── …
    writer              └─ finite? ─ write ─ rename ─ sweep ┘ └─ …

One snapshot and one write at a time, in the order they were asked for. A second snapshot would help
only until the disk is one checkpoint further behind, and would cost the memory of another state.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from echelon.checkpoint.finite import first_non_finite
from echelon.checkpoint.shelf import Shelf
from echelon.checkpoint.snapshot import Snapshot, needed
from echelon.checkpoint.spooled import divided
from echelon.checkpoint.spooled import first_non_finite as first_in_files
from echelon.checkpoint.tree import Flat, flatten
from echelon.core.errors import CheckpointError, NonFiniteError, PeerError

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_NICENESS = 5
"""A third of the weight of a thread that trains: on a busy machine it still gets its turn."""
_LONG = 0.5
"""Seconds of waiting for the disk that are worth a word."""
_LOOK = 0.01
_NO_MEMORY = "checkpoints are written while training waits: there is no memory for a copy"


class _GivenUp(Exception):
    """The run was ended at once: nobody waits for what was being written."""


class Writer:
    """Saves cuts on a shelf from a thread of its own; its methods are for one thread to call.

    A full disk in the middle of a run is only noticed. What cannot be gone on with is raised by the
    call that comes next: values under the path `finite` that are not, a shelf that takes nothing.
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        notice: Callable[[str], None] | None = None,
        finite: str = "strategy/model/",
        allowed: Callable[[int], bool | None] = lambda _version: True,
    ) -> None:
        """`allowed` says whether a version may be written; None if not yet."""
        self.saved = 0
        """The last version that is whole on disk."""
        self._shelf = shelf
        self._notice = notice or (lambda _message: None)
        self._finite = finite
        self._allowed = allowed
        self._snapshot = Snapshot()
        self._held: tuple[int, Flat] | None = None
        """What was saved last."""
        self._small = False
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
        """A run that is ended at once does not wait for its disk."""
        if kind is not None and not issubclass(kind, Exception):
            self._given_up.set()
        self.close()

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._last is not None and not self._last.done()

    def prepare(self, state: Any) -> None:
        """Touch memory for states like this one, so that the first pause is short already."""
        size, pinned = needed(flatten(state))
        self._do(lambda: self._reserve(size, pinned))

    def save(self, version: int, state: Any) -> None:
        """Copy `state` and return; it is on disk later. Without memory for a copy, write it now."""
        flat = flatten(state)
        held, in_files = divided(flat)
        self._await_disk(version)
        self.check()
        self._reserve(*needed(held))
        if self._small:
            self._held = version, flat  # to be tried again if this is the last one
            self._write(version, flat)
            return
        copy = Flat(self._snapshot.take(held).tensors | in_files, flat.skeleton)
        self._held = version, copy
        self._do(lambda: self._write(version, copy))

    def save_now(self, version: int, state: Any) -> None:
        """Write `state` itself; if that cannot be done, it is an error."""
        self.flush()
        self._put(version, flatten(state))

    def mark_best(self, version: int) -> None:
        """Remember a version as the best once it is on disk, if it ever is."""
        self._do(lambda: self._mark_best(version))

    def finish(self, version: int) -> None:
        """Wait for the disk; if it did not take this version when it was saved, try once more."""
        self.flush()
        if self.saved != version:
            assert self._held is not None, "nothing was saved"
            assert self._held[0] == version, f"step {version} was not saved"
            self._put(*self._held)

    def flush(self) -> None:
        """Wait until all that was asked for is done."""
        if self._last is not None:
            self._last.result()
        self.check()

    def check(self) -> None:
        """Raise what went wrong in the background, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """End the thread, after what it is doing, and give the memory back."""
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
        except Exception as error:  # for the thread that trains
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
        """Save, in the middle of a run, which can do without for a while."""
        try:
            self._put(version, flat)
        except PeerError:
            return  # members meet again, and whoever leads then saves
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
        held, in_files = divided(Flat(weights, None))
        path = first_non_finite(held.tensors.items()) or first_in_files(in_files)
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
            return  # it could not be written, and that was told
        try:
            self._shelf.mark_best(version)
        except CheckpointError as error:
            self._notice(str(error))

    def _proceed(self) -> None:
        if self._given_up.is_set():
            raise _GivenUp


def _is_full(error: CheckpointError) -> bool:
    """Whether the disk is full, which may pass; a folder that may not be written to will not."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL


def _step_back() -> None:
    """Let training go first where there are not enough cores for both."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own to set
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
