"""Ctrl-C, SIGTERM or a closed terminal end a run between two steps, with a checkpoint.

A second signal ends it at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SAME_SECONDS = 0.1
"""Two signals within this time count as one: `timeout` and torchrun signal a process and its group,
so that each signal arrives twice."""


@contextmanager
def on_interrupt(ask: Callable[[str], None]) -> Iterator[None]:
    """Call `ask` with the name of the first such signal that arrives inside.

    The second one raises KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; its owner decides what a signal does
        return
    came: list[float] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        came.append(time.monotonic())
        if len(came) == 1:
            ask(signal.Signals(number).name)
        elif came[-1] - came[-2] >= SAME_SECONDS:
            raise KeyboardInterrupt

    before: dict[int, Any] = {number: signal.signal(number, handle) for number in wishes()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def wishes() -> tuple[signal.Signals, ...]:
    """Return the signals that end a run. Under `nohup`, a closed terminal does not."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    asking = (signal.SIGINT, signal.SIGTERM)
    return asking if ignored else (*asking, signal.SIGHUP)
