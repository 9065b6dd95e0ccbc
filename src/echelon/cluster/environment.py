"""The only reader of the environment; fork safety; signals as data."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from echelon.core.errors import UserError

if TYPE_CHECKING:
    from echelon.comm.peers import Place


# --- environment ---
# The only place that reads the environment.

_SPINS = "1000"
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def calm_threads() -> None:
    """Let kernel threads sleep soon when they wait for each other; call before importing torch.

    By default they spin for about a millisecond, which is quickest on an idle machine. As soon as
    anything else wants a core, the one they wait for is not running and every kernel waits in
    vain: measured here on two busy cores, 27 times slower for a small mlp, 2.4 times for a cnn.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def calm_warnings() -> None:
    """Let torch's C++ parts tell errors alone; call before importing it.

    What they warn of is what members of other hosts are used to: a host without a name, a
    connection tried again. What comes of it is told by Echelon.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def stay_on_loopback() -> None:
    """Let gloo of this process listen on loopback alone, not on what the host's name means."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def joined(*, deadline: float = 120.0) -> Place | None:
    """The place that torchrun gave this process; None if it was not started by it.

    torchrun's agent serves a store at MASTER_ADDR:MASTER_PORT and says so
    (TORCHELASTIC_USE_AGENT_STORE): members only connect to it (`served`). It outlives a restart
    of the members, so what they put there is set apart by `name`. Where there is no such agent,
    as with variables set by hand or by a scheduler, member 0 serves the store at that port.
    """
    marks = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    mark = next((name for name in marks if name in os.environ), None)
    if mark is None:
        return None
    for name in _PLACE:
        if not os.environ.get(name):
            raise UserError(
                f"{mark} is set but {name} is not: start with torchrun, which sets "
                f"{', '.join(_PLACE)}, or unset {mark}"
            )
    count = _number("WORLD_SIZE", 1, None)
    from echelon.comm.peers import Place  # torch comes with it

    return Place(
        index=_number("RANK", 0, count - 1),
        count=count,
        host=os.environ["MASTER_ADDR"],
        port=_number("MASTER_PORT", 1, 65535),
        deadline=deadline,
        served=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        name=f"echelon/{_attempt()}",
        interface=os.environ.get("GLOO_SOCKET_IFNAME") or None,
    )


def beside() -> tuple[int, int]:
    """Which member of this machine this process is, and of how many, as torchrun says.

    Where only a scheduler's variables are set, all are taken to be here.
    """
    if "LOCAL_RANK" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ:
        count = _number("WORLD_SIZE", 1, None)
        return _number("RANK", 0, count - 1), count
    count = _number("LOCAL_WORLD_SIZE", 1, None)
    return _number("LOCAL_RANK", 0, count - 1), count


def _attempt() -> str:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return f"{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _number(name: str, low: int, high: int | None) -> int:
    text = os.environ[name]
    value = int(text) if text.isdecimal() else None
    if value is None or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"{low} to {high}"
        raise UserError(f"{name} = {text!r}: it must be a whole number, {limit}")
    return value


# --- forkable ---
# Whether this process may be forked into members, and what has to end before.
#
# A fork copies one thread. Whatever the other ones were about to do, a lock to give back or a part
# of a kernel to compute, never happens in the copy, which then waits for them for ever.

_HARD = 2
"""omp_pause_hard: end the threads, not only free what they hold."""
_INSTEAD = "start it with `echelon train` or torchrun instead"


def make_forkable() -> None:
    """Refuse where a fork cannot be safe; end the idle kernel threads where it can be made so."""
    _check_threads()
    _check_torch()
    _end_kernel_threads()


def _check_threads() -> None:
    others = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
    if others:
        raise UserError(
            f"workers can only be started before other threads: {', '.join(sorted(others))} "
            f"still run in this process; end them, or {_INSTEAD}"
        )


def _check_torch() -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        raise UserError(
            "workers cannot be started after CUDA was used in this process, for its state does "
            "not survive a fork; start it with torchrun instead"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UserError(
            "workers cannot be started in a process that is a member of a torch.distributed "
            "group; call torch.distributed.destroy_process_group() before"
        )


def _end_kernel_threads() -> None:
    """OpenMP keeps its threads after the first kernel and expects to find them after a fork.

    Measured: a kernel on two threads in the parent, then one in the child: the child hangs.
    Other pools (OpenBLAS, Arrow) look after themselves when a process forks. The threads come
    back by themselves with the next kernel, in the parent and in each member.
    """
    for library in _openmp():
        pause = getattr(library, "omp_pause_resource_all", None)
        if pause is None or pause(_HARD) != 0:
            raise UserError(
                "workers cannot be started while kernel threads run in this process and cannot "
                "be paused; set OMP_NUM_THREADS=1 and torch.set_num_threads(1) before the first "
                f"computation, or {_INSTEAD}"
            )


def _openmp() -> list[ctypes.CDLL]:
    """Every copy of GNU's OpenMP in this process: torch and scikit-learn bring one each."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]


# --- signals ---
# Signals as data: a supervisor reads them from a pipe, in the order they came.

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
    from echelon.loop.interrupt import wishes

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
    from echelon.loop.interrupt import wishes

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
