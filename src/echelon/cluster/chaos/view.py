"""The run under test as seen from outside.

Command  the process of `echelon train` or `echelon join`, with all processes that it starts
Scene    the state of the run, followed in its journal
Deed     an injected fault, and what became of it
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from echelon.cluster.chaos.plan import Fault
from echelon.cluster.workers import die_with

PROGRAM = [sys.executable, "-m", "echelon"]
_CHUNK = 1 << 16
_KEPT = 10_000
"""Lines of output that are kept."""
_KILL_SECONDS = 5.0


class Command:
    """`echelon …` as a process in a session of its own; it is killed when this process ends.

    Members have process groups of their own, but stay in the session. So they can be found, and
    found to be gone, even after their parents have ended.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.lines: list[tuple[float, str]] = []
        """(Unix time, text) of each line on stderr."""
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
        """Read its output, so that it never blocks on a full pipe."""
        self._output += b"".join(_chunks(self._stdout.fileno()))
        *lines, self._partial = (self._partial + b"".join(_chunks(self._stderr.fileno()))).split(
            b"\n"
        )
        now = time.time()
        room = _KEPT - len(self.lines)
        self.lines += [(now, line.decode(errors="replace")) for line in lines[:room]]

    @property
    def last_words(self) -> str:
        """The last line on stderr that is not blank."""
        said = [text for _, text in self.lines if text.strip()]
        return said[-1] if said else "it said nothing"

    def family(self) -> list[int]:
        """Return the pids of its living processes, including all it started."""
        return in_session(self.pid)

    def close(self) -> None:
        """Kill all its processes."""
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
    """Return the pids of a session's living processes."""
    numbered = (entry for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return sorted(int(entry.name) for entry in numbered if _session(entry) == session)


def _session(entry: Path) -> int | None:
    """Return a process's session; None if the process has ended, reaped or not."""
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


class Scene:
    """The state of a run as its journal shows it: who is there, and what has happened so far."""

    def __init__(self, journal: Path) -> None:
        self.living: dict[int, int] = {}
        """Member id → pid, for members that are not lost."""
        self.seen: set[int] = set()
        """All members so far, including lost ones."""
        self.order: list[int] = []
        """The members of the last generation."""
        self.began = 0
        """The version at which it began."""
        self.version = 0
        self.coordinator: int | None = None
        self.events: list[Entry] = []
        """All entries but commits."""
        self.commits: list[Commit] = []
        self.is_over = False
        """Whether training is over, and the members are leaving."""
        self._tail = Tail(journal)

    @property
    def leader(self) -> int | None:
        return next((member for member in self.order if member in self.living), None)

    @property
    def taking_part(self) -> list[int]:
        """Members of the last generation that are not lost."""
        return [member for member in self.order if member in self.living]

    def update(self) -> None:
        for entry in self._tail.read():
            if entry["kind"] == "committed":
                self._committed(entry)
            else:
                self.events.append(entry)
                self._happened(entry["kind"], entry)

    def _committed(self, entry: Entry) -> None:
        self.version = max(self.version, entry["last"])
        self.commits.append(Commit(entry["time"], entry["generation"], entry["last"]))

    def _happened(self, kind: str, entry: Entry) -> None:
        if kind == "joined":
            self.seen.add(entry["member"])
            self.living[entry["member"]] = entry["pid"]
        elif kind == "lost":
            self.living.pop(entry["member"], None)
        elif kind == "generation":
            self.order, self.began = entry["members"], entry["version"]
        elif kind == "coordinator":
            self.coordinator = entry["pid"]
        elif kind == "rolled_back":
            self.version = entry["version"]
        elif kind in ("over", "finished"):
            self.is_over = True


class Commit(NamedTuple):
    """The journal's entry of committed updates, as far as it is needed here."""

    time: float
    generation: int
    last: int


class Tail:
    """Reads entries as they are added to a journal, whole lines only: an unfinished line may be
    cut off again."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[Entry]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


Entry = dict[str, Any]
"""A line of the journal."""


@dataclass(slots=True)
class Deed:
    """A fault that was injected, or the reason why it was not."""

    fault: Fault
    version: int = 0
    """The last journaled version when it was injected."""
    moment: float = 0.0
    """Unix time of the injection."""
    skipped: str | None = None
    """Why it was not injected."""
    members: list[int] = field(default_factory=list)
    """The ids of the members it hit; for a join, of the members that joined."""
    pids: list[int] = field(default_factory=list)
    coordinator: bool = False
    server: int | None = None
    """The parameter-server shard it hit."""
    detected: float | None = None
    """Seconds until it was detected; None if it never was."""
    recovered: float | None = None
    """Seconds until the first update after the run had recovered."""
    lost_steps: int = 0
    note: str = ""
    problem: str | None = None
    """A consequence that is an error of Echelon."""

    @property
    def who(self) -> str:
        if self.coordinator:
            return "coordinator"
        if self.server is not None:
            return f"server {self.server}"
        return ", ".join(f"member {member}" for member in self.members)

    def as_data(self) -> dict[str, Any]:
        return {
            "fault": str(self.fault),
            "version": self.version,
            "skipped": self.skipped,
            "members": self.members,
            "detected_s": _rounded(self.detected),
            "recovered_s": _rounded(self.recovered),
            "steps_lost": self.lost_steps,
            "note": self.note,
            "problem": self.problem,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
