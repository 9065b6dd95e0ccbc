"""The first and the last steps of a member's process; in between is its work."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, NoReturn

from echelon.cluster import signals
from echelon.cluster.environment import stay_on_loopback
from echelon.cluster.fault import fault_of
from echelon.cluster.member import Member, encoded
from echelon.cluster.pipes import Pipes
from echelon.cluster.relay import Relay, RelayThread
from echelon.core.process import keep_freed_memory

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1

Work = Callable[[Member], Mapping[str, Any]]


def live(member: Member, work: Work, pipes: Pipes, supervisor: int) -> NoReturn:
    """Do the work and report its end. Never returns: what is up the stack belongs to the parent."""
    code = 1
    try:
        try:
            code, last = _outcome(member, work, pipes, supervisor)
        except KeyboardInterrupt as error:  # a second one, while the first was being told
            signals.deaf()
            last = encoded("error", fault_of(error))
        member.send(last)
    finally:
        os._exit(code)  # the parent's exit handlers are not ours to run


def _outcome(member: Member, work: Work, pipes: Pipes, supervisor: int) -> tuple[int, bytes]:
    """Exit code and last word of a member."""
    place = member.place
    try:
        with closing(_settle(place.index, pipes, supervisor)):
            signals.as_new()
            result = work(member)
            signals.deaf()
            _flush()
        return 0, encoded("result", result)
    except BaseException as error:
        signals.deaf()
        _flush()
        if error.__traceback__ is not None:  # this frame is not worth showing
            error.__traceback__ = error.__traceback__.tb_next
        return 1, encoded("error", fault_of(error))


def _settle(index: int, pipes: Pipes, supervisor: int) -> RelayThread:
    """Become a process of our own."""
    die_with(supervisor)
    os.setpgid(0, 0)
    pipes.keep_only(index)
    stay_on_loopback()
    keep_freed_memory()
    _close_stdin()
    if index != 0:
        _speak_through(pipes.voices[index])
    return RelayThread(Relay(pipes.texts if index == 0 else {}))


def die_with(supervisor: int) -> None:
    """No member outlives its supervisor, however that one ends."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor:  # it was gone before we asked
        os._exit(1)


def _close_stdin() -> None:
    """Only a terminal's foreground group may read from it: another one would be stopped."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _speak_through(voice: int) -> None:
    """Let Python's and everybody else's text go into this pipe, line by line."""
    os.dup2(voice, 1)
    os.dup2(voice, 2)
    out = open(voice, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    sys.stdout = sys.stderr = out


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()


def only(work: Callable[[], int | None]) -> NoReturn:
    """Be a forked process that does this and nothing else; it may return an exit code."""
    code = 1
    try:
        code = work() or 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
