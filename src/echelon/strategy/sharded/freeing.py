"""What is freed goes back to the system."""

from __future__ import annotations

import ctypes

LARGE = 1 << 20
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in malloc.h


def give_back_large() -> None:
    """Have every buffer of a megabyte or more returned to the system as soon as it is freed.

    glibc takes a buffer of up to 32 MB from its heap once one of that size was freed, and between
    buffers that live on, whole layers' worth of memory stays unusable: measured, members held three
    times what they needed. Other C libraries have no such setting, and no such habit.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, LARGE)
