"""Settings of the running process: its memory allocator, and delayed Ctrl-C."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MB of freed memory, for its next step to use.

    Each step frees what it allocated. If that memory goes back to the kernel, the next step gets
    it page by page: for a small gpt that cost 3,600 page faults and 3 % of the time of every step.
    Blocks above 32 MB still go back to the kernel.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # only glibc has it
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def give_back_freed_memory() -> None:
    """Return all kept memory to the kernel. Called when work begins that needs other memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_LARGE = 32 << 20
_KEPT = 256 << 20


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Delay a Ctrl-C that arrives inside the block until the block ends.

    Between starting a process and noting that it was started, an interrupt would leave a process
    that is never ended.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # SIGINT is ignored, or raised in the main thread only: nothing to delay
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
