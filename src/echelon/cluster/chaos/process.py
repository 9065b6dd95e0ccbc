"""The command under test, as a process with all that it starts.

Members are in process groups of their own, but in the session of whoever started them: that is how
they are found, and found missing, whatever becomes of their parents.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from echelon.cluster.child import die_with

PROGRAM = [sys.executable, "-m", "echelon"]
_CHUNK = 1 << 16
_KEPT = 10_000
"""Lines of output that are remembered."""
_KILL_SECONDS = 5.0


class Command:
    """`echelon …` in a session of its own. Ends with us, however that happens."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.lines: list[tuple[float, str]] = []
        """What it said on stderr, and when that was read."""
        self._output = b""
        self._partial = b""
        self._process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdout, self._stderr = self._process.stdout, self._process.stderr
        for pipe in (self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._output.decode(errors="replace")

    def drain(self) -> None:
        """Read what it has said, so that it never waits for us."""
        self._output += b"".join(_chunks(self._stdout.fileno()))
        *lines, self._partial = (self._partial + b"".join(_chunks(self._stderr.fileno()))).split(
            b"\n"
        )
        now = time.time()
        room = _KEPT - len(self.lines)
        self.lines += [(now, line.decode(errors="replace")) for line in lines[:room]]

    @property
    def last_words(self) -> str:
        """The last line of what it said."""
        said = [text for _, text in self.lines if text.strip()]
        return said[-1] if said else "it said nothing"

    def family(self) -> list[int]:
        """What still runs of it and of all that it started."""
        return in_session(self.pid)

    def close(self) -> None:
        """Nothing of it is left."""
        deadline = time.monotonic() + _KILL_SECONDS
        while (left := self.family()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._process.kill()
        self._process.wait(_KILL_SECONDS)
        self.drain()
        self._stdout.close()
        self._stderr.close()


def in_session(session: int) -> list[int]:
    """The living processes of a session."""
    numbered = (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return sorted(int(entry.name) for entry in numbered if _session(entry) == session)


def _session(entry: Path) -> int | None:
    """None for one that has ended, be it reaped or not."""
    try:
        stat = (entry / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    state, _, _, session = stat.rpartition(")")[2].split()[:4]
    return None if state in "ZX" else int(session)


def _chunks(descriptor: int) -> list[bytes]:
    found = []
    try:
        while chunk := os.read(descriptor, _CHUNK):
            found.append(chunk)
    except BlockingIOError:
        return found
    return found
