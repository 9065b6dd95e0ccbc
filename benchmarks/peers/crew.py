"""A side's processes for one round: started afresh, waited for, and always ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from .screen import screen
from .together import MEMBERS, STARTS_ITSELF

_BENCHMARKS = Path(__file__).resolve().parents[1]
_LOOPBACK = "127.0.0.1"
_LOOK = 0.1
_GRACE = 5.0
"""Seconds for the others once one process has failed, and from SIGTERM to SIGKILL."""
_SHOWN = 6000
"""Bytes of a failed side's output."""


class SideFailed(Exception):
    """Says how, and what the side printed."""


def play(
    side: str, task: Sequence[str], deadline: float, seat: str = "peers.seat"
) -> tuple[float, float]:
    """One round: steps per second, and the loss afterwards. `task` is for the seats, the modules
    that the processes run; they are given the side's name first."""
    command = [sys.executable, "-m", seat, side, *task]
    alone = seat != "peers.seat" or side in STARTS_ITSELF
    with tempfile.TemporaryDirectory() as folder:
        printed, result = Path(folder) / "printed", Path(folder) / "result"
        with printed.open("wb") as keep, screen(keep), _seats(command, alone, result) as processes:
            wrong = _wait(processes, deadline)
        if wrong is None and not result.is_file():
            wrong = "gave no result"
        if wrong is not None:
            raise SideFailed(f"{side} {wrong}; it printed:\n{tail(printed)}")
        found = json.loads(result.read_text(encoding="utf-8"))
    return found["rate"], found["loss"]


def run(name: str, command: Sequence[str], folder: Path, deadline: float) -> None:
    """`python -m …` to its end, in front of a terminal; it starts others itself, if at all."""
    printed = folder / "printed"
    words = [sys.executable, "-m", *command]
    with printed.open("wb") as keep, screen(keep), _process(words, {}) as process:
        wrong = _wait([process], deadline)
    if wrong is not None:
        raise SideFailed(f"{name} {wrong}; it printed:\n{tail(printed)}")


@contextmanager
def _seats(
    command: list[str], alone: bool, result: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    first = [*command, "--result", str(result)]
    with ExitStack() as stack:
        if alone:
            yield [stack.enter_context(_process(first, {}))]
            return
        # Served from here, as torchrun's agent does: no port has to be guessed.
        store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
        yield [
            stack.enter_context(_process(command if rank else first, _place(rank, store.port)))
            for rank in range(MEMBERS)
        ]


@contextmanager
def _process(command: Sequence[str], place: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    # In a session of its own, so that whatever it has started can be ended with it.
    process = subprocess.Popen(
        command, env=environment() | place, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        end(process)


def environment() -> dict[str, str]:
    """Ours, without a place that somebody else may have given us."""
    theirs = _place(0, 0)
    path = [str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {name: value for name, value in os.environ.items() if name not in theirs} | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TERM": "xterm-256color",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(path),
    }


def _place(rank: int, port: int) -> dict[str, str]:
    """What torchrun would say."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(MEMBERS),
        "LOCAL_WORLD_SIZE": str(MEMBERS),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "benchmark",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> str | None:
    """Until all have ended; returns what went wrong, if so."""
    until, wrong = time.monotonic() + deadline, None
    while any(process.poll() is None for process in processes):
        if wrong is None and (wrong := _failure(processes)):
            until = min(until, time.monotonic() + _GRACE)
        if time.monotonic() > until:
            return wrong or f"did not end within {deadline:g} s"
        time.sleep(_LOOK)
    return wrong or _failure(processes)


def _failure(processes: Sequence[subprocess.Popen[bytes]]) -> str | None:
    for rank, process in enumerate(processes):
        if code := process.poll():
            return f"ended with {code} in process {rank}"
    return None


def end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        _wait([process], _GRACE)


def tail(printed: Path) -> str:
    text = printed.read_bytes()[-_SHOWN:].decode(errors="replace")
    return text.replace("\r\n", "\n").strip() or "nothing"
