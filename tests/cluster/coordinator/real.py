"""A coordinator in a process of its own, with real sockets and a real journal."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from echelon.cluster.coordinator import About, Generation, Liaison, Settings, serve
from echelon.cluster.workers import only
from echelon.comm.peers import this_host
from echelon.data.journal import Journal, entries

DEADLINE = 60.0


def fork(work: Callable[[], object]) -> int:
    """A child that does this and nothing else."""

    def body() -> None:
        work()

    pid = os.fork()
    if pid == 0:
        only(body)
    return pid


def reap(pid: int, seconds: float = DEADLINE) -> int:
    """How it ended: exit code or minus the signal."""
    until = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        assert time.monotonic() < until, f"process {pid} has not ended in {seconds:g} s"
        time.sleep(0.005)


class Coordinator:
    """Its listening socket outlives it, as the supervisor's does."""

    def __init__(self, folder: Path, expected: int = 1, min_workers: int = 1) -> None:
        self.path = folder / "journal.jsonl"
        self.log = folder / "stderr"
        self.key = secrets.token_bytes(32)
        self.settings = Settings(
            key=self.key,
            expected=expected,
            min_workers=min_workers,
            wait=DEADLINE,
            samples=1000,
            run={"job": "digits"},
        )
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.pid: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.listener.close()
        print(self.log.read_text())  # shown if the test fails

    def start(self) -> None:
        self.pid = fork(self._serve)

    def _serve(self) -> None:
        sys.stderr = self.log.open("a", buffering=1)
        past = list(entries(self.path))
        with Journal(self.path) as journal:
            serve(self.listener, self.settings, journal, past, ("127.0.0.1", 7))

    def kill(self, number: int = signal.SIGKILL) -> int | None:
        """How it ended; nothing if it had before."""
        pid, self.pid = self.pid, None
        if pid is None:
            return None
        os.kill(pid, number)
        return reap(pid)

    def ended(self) -> int:
        """How it ended by itself."""
        assert self.pid is not None
        pid, self.pid = self.pid, None
        return reap(pid)

    def written(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in entries(self.path) if entry["kind"] == kind]


class Trainer:
    """A liaison, and all that it was told."""

    def __init__(
        self,
        coordinator: Coordinator,
        number: int | None = None,
        host: str | None = None,
        key: bytes | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        self.orders: list[tuple[str, bool]] = []
        self.notices: list[str] = []
        self.ends: list[str] = []
        self.liaison = Liaison(
            coordinator.address,
            key or coordinator.key,
            About(number, f"trainer {number}", host or this_host()),
            regroup=lambda why, urgent: self.orders.append((why, urgent)),
            notice=self.notices.append,
            ended=self.ends.append,
            deadline=deadline,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.liaison.close()


def arrive_together(
    *trainers: Trainer, generation: int = 0, progress: tuple[int, ...] = (0,)
) -> list[Generation]:
    """All at once, each in a thread."""
    found: dict[int, Generation] = {}

    def arrive(at: int) -> None:
        found[at] = trainers[at].liaison.arrive(generation, progress, "together")

    threads = [threading.Thread(target=arrive, args=(at,)) for at in range(len(trainers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(found) == len(trainers), "not all of them came into a generation"
    return [found[at] for at in range(len(trainers))]
