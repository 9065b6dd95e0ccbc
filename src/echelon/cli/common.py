"""Arguments, output, Ctrl-C for every verb."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from echelon.core.errors import UserError

# --- arguments ---
# What the verbs have in common on the command line.


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """At most one job file, and any number of `key=value`."""
    files = [text for text in arguments if "=" not in text]
    overrides = [text for text in arguments if "=" in text]
    if len(files) > 1:
        raise UserError(f"one job file at a time, not {len(files)}: {', '.join(files)}")
    return (Path(files[0]) if files else None), overrides


def command() -> str:
    """How Echelon was called, for hints that can be copied: `echelon`, or the path to it."""
    here = Path(sys.argv[0])
    if here.name != "echelon":
        return "python -m echelon"
    found = shutil.which("echelon")
    if found is not None and Path(found).resolve() == here.resolve():
        return "echelon"
    return str(here)


def say(lines: Iterable[str]) -> None:
    """Print, and be sure that it went out: a full disk is said in one line."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough: that is no mistake
        raise
    except OSError as error:
        _drop_stdout()
        raise UserError(f"the output cannot be written: {error.strerror}") from None


def _drop_stdout() -> None:
    """What is still in the buffer would fail once more when Python ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


# --- interrupt ---
# Ctrl-C ends every command with one line and exit code 130, whatever it was doing.

INTERRUPTED = 130
"""What was stopped is not done; some of it can be gone on with."""
_LINE = b"echelon: stopped\n"


class _Pressed(KeyboardInterrupt):
    """The plain one would be remembered by Python where compiled code meets it: it would end this
    process by SIGINT although it was dealt with."""


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
