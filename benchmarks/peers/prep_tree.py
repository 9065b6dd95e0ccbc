"""A command run to its end: how long it took, and the most memory its whole tree of processes held.

Memory is the proportional set size: what is mapped by several counts once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_EVERY = 0.1
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Spent:
    seconds: float
    cpu: float
    """User and system seconds of all its processes."""
    peak_mb: float


def run(command: Sequence[str], folder: Path, deadline: float) -> Spent:
    """Run it in `folder`; its output is shown only if it fails."""
    log = folder / "output.txt"
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with log.open("w+b") as output:
        began = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | threads,
            start_new_session=True,
        )
        try:
            found = _watched(process, began, deadline)
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode:
        told = log.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{told}")
    log.unlink()
    return found


def _watched(process: subprocess.Popen[bytes], began: float, deadline: float) -> Spent:
    peak = 0.0
    while True:
        gone, status, used = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - began
        if gone:
            process.returncode = os.waitstatus_to_exitcode(status)
            return Spent(seconds, used.ru_utime + used.ru_stime, peak)
        if seconds > deadline:
            raise SystemExit(f"{process.args!r} did not end within {deadline:g} s")
        peak = max(peak, sum(_held(pid) for pid in tree(process.pid)))
        time.sleep(_EVERY)


def tree(pid: int) -> Iterator[int]:
    """A process and all that come from it."""
    yield pid
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))


def _held(pid: int) -> float:
    """MB; 0 for a process that has just ended."""
    with suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0
