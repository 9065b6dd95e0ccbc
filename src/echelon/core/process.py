"""Allocator settings, delayed Ctrl-C, lazy imports."""

from __future__ import annotations

import ctypes
import importlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

# --- heap ---
# How the C library's allocator treats freed memory.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_LARGE = 32 << 20
_KEPT = 256 << 20


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MB of what it freed, for its next step to use.

    Each step frees what it allocated. Given back to the kernel it comes anew in the next one, page
    by page: for a small gpt that was 3,600 page faults and 3 % of the time of every step. Blocks
    above 32 MB are given back as ever.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc; elsewhere the allocator is another one
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def give_back_freed_memory() -> None:
    """Other work begins, which needs other memory: the kernel gets all that was kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# --- patience ---
# Moments in which Ctrl-C has to wait.


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """A Ctrl-C that comes inside counts when this ends.

    A process that is being started is nobody's for a moment: were that moment interrupted, nobody
    would end it.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield  # nothing is raised here
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])


# --- lazy ---
# Names of a package that are imported when somebody asks for them.


def lazily(package: str, where: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A `__getattr__` for `package`: `where` has the names that each of its modules gives."""
    modules = {name: module for module, names in where.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get
