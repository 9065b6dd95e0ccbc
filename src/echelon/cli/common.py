"""What all commands share: reading their arguments, printing, and ending on Ctrl-C.

Ctrl-C ends a command with one line and exit code 130 at any moment:

    imports of the command line    `exit_interrupted`, installed by __main__.py: exits at once
    a command                      `stoppable`: raises KeyboardInterrupt in it, so it can clean up
    … while torch is imported      exits at once, for torch might swallow the exception
    after the command              ignored
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from echelon.core.errors import UserError

_KEY = re.compile(r"[a-z_]+(\.(?!ya?ml$)[a-z0-9_]+)*")
"""The name of a setting, such as epochs or optimizer.lr; not job.yaml."""


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Divide arguments into at most one job file and any number of `key=value` overrides."""
    files = [text for text in arguments if "=" not in text]
    overrides = [text for text in arguments if "=" in text]
    for text in files:
        if _KEY.fullmatch(text) and not Path(text).exists():
            raise UserError(f"{text!r} is no file; to set {text}, write {text}=VALUE")
    if len(files) > 1:
        raise UserError(f"one job file at a time, not {len(files)}: {', '.join(files)}")
    return (Path(files[0]) if files else None), overrides


def command() -> str:
    """Return how Echelon was called, for hints that can be copied: `echelon`, or the path to it."""
    here = Path(sys.argv[0])
    if here.name != "echelon":
        return "python -m echelon"
    found = shutil.which("echelon")
    if found is not None and Path(found).resolve() == here.resolve():
        return "echelon"
    return str(here)


def say(lines: Iterable[str]) -> None:
    """Print lines and flush them, so that a full disk is reported as an error in one line."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe: no error
        raise
    except OSError as error:
        _drop_stdout()
        raise UserError(f"the output cannot be written: {error.strerror}") from None


def _drop_stdout() -> None:
    """Redirect stdout to nothing: flushing the rest of its buffer at exit would fail again."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


INTERRUPTED = 130
"""Exit code of a command that was interrupted: 128 + SIGINT, as shells report it."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Run a command in which Ctrl-C raises KeyboardInterrupt, and exit with 130 after that.

    Compiled modules that are interrupted while they are imported turn the exception into an
    ImportError, or catch it and fail later. So any exception after Ctrl-C counts as interrupted.
    """
    pressed = False

    def press(_number: int, _frame: FrameType | None) -> NoReturn:
        nonlocal pressed
        pressed = True
        if _torch_is_importing():
            # torch might swallow an exception; no command begins anything before it is imported
            exit_interrupted()
        raise _Pressed

    from typer import Exit

    before = signal.getsignal(signal.SIGINT)
    ours = before in (exit_interrupted, signal.default_int_handler)
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        yield
    except Exit:  # the command has printed its message
        raise
    except BaseException as error:
        if not pressed and not isinstance(error, KeyboardInterrupt):
            raise
        _print_stopped()
        raise Exit(INTERRUPTED) from None
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def exit_interrupted(_number: int = signal.SIGINT, _frame: FrameType | None = None) -> NoReturn:
    """Print one line and exit at once, without cleaning up. Usable as a signal handler."""
    _print_stopped()
    os._exit(INTERRUPTED)


class _Pressed(KeyboardInterrupt):
    """The KeyboardInterrupt raised by Ctrl-C.

    Python remembers a plain KeyboardInterrupt that passes through compiled code, and would end the
    process by SIGINT although the exception was handled.
    """


def _torch_is_importing() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return getattr(spec, "_initializing", False)


_LINE = b"echelon: stopped\n"


def _print_stopped() -> None:
    try:
        os.write(2, _LINE)  # unlike print, safe in a signal handler
    except OSError:  # stderr is closed
        return
