"""The process's surroundings: environment variables, threads before a fork, and signals.

No other module reads the environment.
"""

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


# Environment variables.


_SPINS = "1000"
_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def calm_threads() -> None:
    """Let OpenMP threads sleep soon when they wait for each other; call before importing torch.

    By default they spin for about a millisecond, which is fastest on an idle machine. When another
    process uses a core, the thread they wait for is not running, and every kernel spins in vain:
    measured on two busy cores, 27 times slower for a small mlp, 2.4 times for a cnn.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def calm_warnings() -> None:
    """Let torch's C++ code log errors only; call before importing torch.

    Its warnings are about harmless events between hosts: a host without a name, a connection that
    is tried again. Echelon itself reports failures that follow.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def stay_on_loopback() -> None:
    """Let gloo listen on loopback only, not on the address that the host's name resolves to."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def joined(*, deadline: float = 120.0) -> Place | None:
    """Return the place that torchrun gave this process; None if torchrun did not start it.

    torchrun's agent serves a store at MASTER_ADDR:MASTER_PORT and announces it with
    TORCHELASTIC_USE_AGENT_STORE; then members only connect to it (`served`). The store outlives a
    restart of the members, so each attempt uses its own `name` in it. Without an agent, when a
    person or a scheduler has set the variables, member 0 serves the store at that port.
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
    from echelon.comm.peers import Place  # imports torch

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
    """Return this process's index among torchrun's processes of this machine, and their count.

    If only a scheduler's variables are set, all processes are assumed to be on this machine.
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


# Before a fork.


_HARD = 2
"""omp_pause_hard: end the threads, not only free their memory."""
_INSTEAD = "start it with `echelon train` or torchrun instead"


def make_forkable() -> None:
    """End idle OpenMP threads, so that this process can be forked; refuse if that is not enough.

    A fork copies only the calling thread. What other threads were about to do, such as releasing a
    lock or computing a part of a kernel, never happens in the copy, which would wait forever.
    """
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
    Other pools (OpenBLAS, Arrow) handle forks themselves. The next kernel starts the threads again,
    in the parent and in each member.
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
    """Return every copy of GNU's OpenMP in this process: torch and scikit-learn load one each."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in maps if "libgomp" in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]


# Signals.


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Requests to stop, which the supervisor passes on to the members."""
SUSPEND = signal.SIGTSTP
"""Ctrl-Z."""
_ALL = (*FORWARDED, SUSPEND)


@contextmanager
def caught() -> Iterator[Ends]:
    """Turn signals that ask to stop or pause into bytes of a pipe, in the order of their arrival.

    The C-level handler writes the byte (the signal's number) at once. A Python handler could not do
    it: it runs between two bytecodes, so after a signal that arrives just before a blocking call,
    it would run only after that call. Other signals with a Python handler appear in the pipe, too.
    """
    from echelon.loop.interrupt import wishes

    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    pauses = () if signal.getsignal(SUSPEND) == signal.SIG_IGN else (SUSPEND,)
    before = {number: signal.signal(number, _written) for number in (*wishes(), *pauses)}
    # If SIGCHLD is ignored, the kernel discards the exit status of children.
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield Ends(reader, writer)
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(woken)
        os.close(reader)
        os.close(writer)


class Ends(NamedTuple):
    """The two ends of a pipe."""

    reader: int
    writer: int


def _written(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the signal's byte is in the pipe already."""


def suspend() -> None:
    """Stop this process as Ctrl-Z would; return when it is continued.

    The kernel does not stop it if no process could continue it, as in a container without a shell.
    """
    before = signal.signal(SUSPEND, signal.SIG_DFL)
    os.kill(os.getpid(), SUSPEND)
    signal.signal(SUSPEND, before)


@contextmanager
def held_back() -> Iterator[None]:
    """Block signals inside, so that a forked process can first drop its parent's handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def as_new() -> None:
    """Restore the signal handlers of a fresh Python process, and unblock signals."""
    from echelon.loop.interrupt import wishes

    signal.set_wakeup_fd(-1)
    for number in (*wishes(), SUSPEND):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Members are not in the terminal's foreground group, yet they may write to it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)


def deaf() -> None:
    """Ignore requests to stop from here on: a member is about to report its end and exit."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
