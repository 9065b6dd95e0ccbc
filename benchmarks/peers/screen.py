"""A terminal that nobody looks at: every side draws its progress as it would for a person."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

LINES_COLUMNS = (40, 120)


@contextmanager
def screen(keep: IO[bytes] | None = None) -> Iterator[None]:
    """Everything written inside, by whatever way, goes to a pseudo-terminal, and from there into
    the file `keep` or nowhere."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, LINES_COLUMNS)
    with ExitStack() as stack:
        # A process of its own reads what is drawn: a thread would take the interpreter's lock.
        reader = subprocess.Popen(
            ["cat"], stdin=master, stdout=keep or subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(master)
        stack.callback(reader.wait)
        # Once nobody holds the terminal any more, the reader sees its end.
        stack.callback(os.close, slave)
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            stack.enter_context(_redirected(number, slave))
            stack.callback(stream.flush)
        yield


@contextmanager
def _redirected(number: int, target: int) -> Iterator[None]:
    kept = os.dup(number)
    os.dup2(target, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
