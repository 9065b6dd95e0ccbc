"""Signs of life in shared memory: writing one costs a store or two and never waits."""

from __future__ import annotations

import mmap
import time
from typing import NamedTuple

_SLOT = 128
_TEXT = 16
"""A slot: step (int64), moment (float64), then what the member does, as text."""
_ROOM = _SLOT - _TEXT
_NEVER = -1


class Beat(NamedTuple):
    """What a member last said of itself."""

    step: int | None
    doing: str
    moment: float

    @property
    def where(self) -> str:
        """At step 12 (compute)."""
        if self.step is None:
            return "before its first step"
        return f"at step {self.step:,} ({self.doing})" if self.doing else f"at step {self.step:,}"


class Pulses:
    """One slot per member; whoever was forked after this was made shares it."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, count * _SLOT)
        self._view = memoryview(self._memory)
        self._steps = self._view.cast("q")
        self._moments = self._view.cast("d")
        for index in range(count):
            self._steps[index * (_SLOT // 8)] = _NEVER
            self._moments[index * (_SLOT // 8) + 1] = time.monotonic()

    def beat(self, index: int, step: int) -> None:
        """Single aligned stores: a reader never sees half a number."""
        at = index * (_SLOT // 8)
        self._steps[at] = step
        self._moments[at + 1] = time.monotonic()

    def describe(self, index: int, doing: str) -> None:
        text = doing.encode()[:_ROOM]
        start = index * _SLOT + _TEXT
        self._view[start : start + _ROOM] = text.ljust(_ROOM, b"\0")

    def read(self, index: int) -> Beat:
        at = index * (_SLOT // 8)
        start = index * _SLOT + _TEXT
        text = bytes(self._view[start : start + _ROOM]).rstrip(b"\0")
        step = self._steps[at]
        return Beat(
            None if step == _NEVER else step, text.decode(errors="ignore"), self._moments[at + 1]
        )

    def close(self) -> None:
        for view in (self._steps, self._moments, self._view):
            view.release()
        self._memory.close()
