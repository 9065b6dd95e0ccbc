"""Signals as data: a supervisor reads them from a pipe, in the order they came."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

FORWARDED = (signal.SIGINT, signal.SIGTERM)


class Ends(NamedTuple):
    """Of a pipe."""

    reader: int
    writer: int


@contextmanager
def caught() -> Iterator[Ends]:
    """While inside, each SIGINT and SIGTERM is one byte to read from this pipe.

    The byte is written when the signal comes. A handler in Python could not do it: it runs
    between two lines of Python, so for a signal just before a wait begins only after that wait.
    Other signals that have a handler in Python are in the pipe too.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _written) for number in FORWARDED}
    # Where the end of children is ignored, nobody learns how they ended.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield Ends(reader, writer)
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(woken)
        os.close(reader)
        os.close(writer)


def _written(_number: int, _frame: FrameType | None) -> None:
    """It is in the pipe already."""


@contextmanager
def held_back() -> Iterator[None]:
    """While inside, signals wait: a new process has to get rid of its parent's handlers first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def as_new() -> None:
    """Give a member the handlers a fresh Python process has, and let signals in."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Members are not in the terminal's foreground group, yet they may write to it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)


def deaf() -> None:
    """Nothing may come between a member's last word and its end."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
