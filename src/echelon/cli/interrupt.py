"""Ctrl-C ends every command with one line and exit code 130, whatever it was doing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""What was stopped is not done; some of it can be gone on with."""
_LINE = b"echelon: stopped\n"


class _Pressed(KeyboardInterrupt):
    """The plain one would be remembered by Python where compiled code meets it: it would end this
    process by SIGINT although it was dealt with."""


def main() -> None:
    """`echelon`. This module is quickly imported: Ctrl-C is looked after from then on."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is to be ignored
        signal.signal(signal.SIGINT, _end)  # nothing has begun: there is nothing to clean up
    from echelon.cli.main import main

    try:
        main()
    finally:  # what was to be done is done, or it has been said why not
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def stoppable() -> Iterator[None]:
    """A command: Ctrl-C raises KeyboardInterrupt in it, and that ends it.

    One that comes while compiled modules are imported may end in anything: they make an
    ImportError of it, or catch it and fail later. Whatever is raised after it, that was the cause.
    """
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal pressed
        pressed = True
        if _torch_is_half_there():
            _end()  # it might swallow an exception; no command begins anything before it is there
        raise _Pressed

    from typer import Exit

    before = signal.getsignal(signal.SIGINT)
    ours = before in (_end, signal.default_int_handler)
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        yield
    except Exit:  # it has said what there is to say
        raise
    except BaseException as error:
        if not pressed and not isinstance(error, KeyboardInterrupt):
            raise
        _say()
        raise Exit(INTERRUPTED) from None
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _end(_number: int = signal.SIGINT, _frame: FrameType | None = None) -> NoReturn:
    _say()
    os._exit(INTERRUPTED)


def _torch_is_half_there() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return getattr(spec, "_initializing", False)


def _say() -> None:
    try:
        os.write(2, _LINE)  # safe wherever a signal comes
    except OSError:  # closed: there is nobody left to tell
        return
