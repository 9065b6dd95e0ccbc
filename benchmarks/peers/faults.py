"""A run that is disturbed on purpose: started, looked at through its stamps, and always ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .crew import SideFailed, end, environment, tail
from .stamps import Stamp, read_stamps

_LOOK = 0.02
"""Seconds between two looks: moments are those of the stamps, however seldom they are read."""


class Run:
    """The processes behind one command, as far as their stamps tell of them."""

    def __init__(
        self, command: str, process: subprocess.Popen[bytes], stamps: Path, printed: Path
    ) -> None:
        self._command, self._process = command, process
        self._stamps, self._printed = stamps, printed

    def stamps(self) -> list[Stamp]:
        return read_stamps(self._stamps)

    def wait_for(self, what: Callable[[list[Stamp]], bool], seconds: float) -> None:
        """Until the stamps show it."""
        until = time.monotonic() + seconds
        while not what(self.stamps()):
            if self._process.poll() is not None:
                self._fail(f"ended with {self._process.returncode}")
            if time.monotonic() > until:
                self._fail(f"did not get there in {seconds:g} s")
            time.sleep(_LOOK)

    def _fail(self, how: str) -> None:
        raise SideFailed(f"{self._command} {how}; it printed:\n{tail(self._printed)}")


@contextmanager
def running(command: Sequence[str], folder: Path, stamps: Path, **variables: str) -> Iterator[Run]:
    """`python -m …` in a session of its own, with these variables set."""
    printed = folder / "printed"
    with printed.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            yield Run(" ".join(command[:2]), process, stamps, printed)
        finally:
            end(process)


def pids(stamps: Sequence[Stamp]) -> list[int]:
    """Who applied anything, in the order in which they were started."""
    return sorted({stamp.pid for stamp in stamps})


def recovery(run: Run, victim: int, deadline: float) -> float:
    """Kill a process: seconds until others apply an update that it had no part in.

    With v the last update it applied, what it computed for v + 1 may have been with the others by
    then; v + 2 is the first for which nothing of it can have been.
    """
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def last(stamps: list[Stamp]) -> int:
        return max(stamp.step for stamp in stamps if stamp.pid == victim)

    def over(stamps: list[Stamp]) -> list[Stamp]:
        least = last(stamps) + 2
        return [s for s in stamps if s.pid != victim and s.step >= least and s.moment > killed]

    run.wait_for(lambda stamps: bool(over(stamps)), deadline)
    return min(stamp.moment for stamp in over(run.stamps())) - killed
