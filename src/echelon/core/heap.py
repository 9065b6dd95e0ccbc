"""How the C library's allocator treats freed memory."""

from __future__ import annotations

import ctypes

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
