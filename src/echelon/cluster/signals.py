"""Signals as data: a supervisor reads them from a pipe, in the order they came."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from echelon.loop.interrupt import wishes

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ask for an end: for members as well."""
SUSPEND = signal.SIGTSTP
"""Ctrl-Z."""
_ALL = (*FORWARDED, SUSPEND)


class Ends(NamedTuple):
    """Of a pipe."""

    reader: int
    writer: int


@contextmanager
def caught() -> Iterator[Ends]:
    """While inside, each signal that asks for an end or a pause is one byte to read from this pipe.

    The byte is written when the signal comes. A handler in Python could not do it: it runs
    between two lines of Python, so for a signal just before a wait begins only after that wait.
    Other signals that have a handler in Python are in the pipe too.
    """
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    pauses = () if signal.getsignal(SUSPEND) == signal.SIG_IGN else (SUSPEND,)
    before = {number: signal.signal(number, _written) for number in (*wishes(), *pauses)}
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


def suspend() -> None:
    """Stop this process as Ctrl-Z would; returns when it goes on.

    Where nobody could let it go on, as in a container without a shell, the kernel does not stop it.
    """
    before = signal.signal(SUSPEND, signal.SIG_DFL)
    os.kill(os.getpid(), SUSPEND)
    signal.signal(SUSPEND, before)


def _written(_number: int, _frame: FrameType | None) -> None:
    """It is in the pipe already."""


@contextmanager
def held_back() -> Iterator[None]:
    """While inside, signals wait: a new process has to get rid of its parent's handlers first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def as_new() -> None:
    """Give a member the handlers a fresh Python process has, and let signals in."""
    signal.set_wakeup_fd(-1)
    for number in (*wishes(), SUSPEND):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Members are not in the terminal's foreground group, yet they may write to it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)


def deaf() -> None:
    """Nothing may come between a member's last word and its end."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
