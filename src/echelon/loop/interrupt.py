"""Ctrl-C and SIGTERM end a run between two steps, with a checkpoint; a second one ends it now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def on_interrupt(ask: Callable[[str], None]) -> Iterator[None]:
    """While inside, the first SIGINT or SIGTERM calls `ask` with its name."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; its owner decides what a signal does
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, before[number] if number == signal.SIGTERM else _at_once)
        ask(signal.Signals(number).name)

    before: dict[int, Any] = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _at_once(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
