"""Keeps a coordinator running: if it ends, another one takes over where its journal ends.

The listening socket belongs to the supervisor. Members that reach out while there is no coordinator
wait in its queue, and find the next one at the same address. The store where the members of a
generation find each other is the supervisor's own: it outlives coordinators.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from echelon.cluster import signals
from echelon.cluster.child import die_with, only
from echelon.cluster.coordinator import Settings, serve
from echelon.cluster.listening import listening
from echelon.core.errors import TrainingError
from echelon.data.journal import Journal, entries

_END_SECONDS = 2.0
_STOPPED = 1
"""The exit code of a coordinator that ends before the run is over."""
_MOST_IN_ROW, _ROW_SECONDS = 5, 10.0
"""A coordinator that ends so often within so many seconds will not get any better."""


@dataclass(frozen=True, slots=True)
class Office:
    """What every coordinator of a run is given."""

    settings: Settings
    journal: Path
    address: str


class Keeper:
    """The coordinator's process, as the supervisor holds it."""

    def __init__(self, office: Office) -> None:
        self._office = office
        self._listener = listening("elastic", office.address)
        self.port: int = self._listener.getsockname()[1]
        self._meeting: socket.socket | None = listening("elastic", office.address)
        self._store_at = (office.address, int(self._meeting.getsockname()[1]))
        self._store: TCPStore | None = None
        self._attended = True
        self.pid = 0
        self.handle = -1
        """Its pidfd: readable once it has ended."""
        self._starts: list[float] = []

    def start(self, besides: Callable[[], None]) -> None:
        """Fork one; `besides` closes in it what is not its own."""
        now = time.monotonic()
        self._starts = [*self._starts, now][-_MOST_IN_ROW:]
        if len(self._starts) == _MOST_IN_ROW and now - self._starts[0] < _ROW_SECONDS:
            raise TrainingError(f"the coordinator ended {_MOST_IN_ROW} times in {_ROW_SECONDS:g} s")
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            only(lambda: 0 if self._serve(besides, supervisor) else _STOPPED)
        self.handle = os.pidfd_open(self.pid)

    def serve_store(self) -> None:
        """To be called once all members are forked: it brings a thread with it."""
        assert self._meeting is not None
        host, port = self._store_at
        meeting, self._meeting = self._meeting.detach(), None
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
            master_listen_fd=meeting,
        )

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)

    def leave_alone(self) -> None:
        """No member of ours is left: the run is over once nobody else takes part."""
        self._attended = False
        self.signal(signal.SIGUSR1)  # one that is not ready for it ends, and is started again

    def ending(self) -> str | None:
        """How the run ended, as the coordinator wrote it down."""
        status = None
        for entry in entries(self._office.journal):
            status = {"begun": None, "finished": entry.get("status")}.get(entry["kind"], status)
        return status

    def reap(self) -> int:
        """It has ended: how. 0 means that the run is over."""
        os.close(self.handle)
        _, status = os.waitpid(self.pid, 0)
        self.pid, self.handle = 0, -1
        return os.waitstatus_to_exitcode(status)

    def shut(self) -> None:
        """Nobody is to wait for a coordinator any more."""
        self._listener.close()

    def close(self) -> None:
        """End it, and let nobody reach out any more."""
        self.shut()
        self._store = None
        if self._meeting is not None:
            self._meeting.close()
        if not self.pid:
            return
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        while os.waitid(os.P_PIDFD, self.handle, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                break
            time.sleep(0.005)
        self.reap()

    def _serve(self, besides: Callable[[], None], supervisor: int) -> bool:
        """In the coordinator's process. Returns whether the run is over."""
        die_with(supervisor)
        os.setpgid(0, 0)
        besides()
        signals.as_new()
        office = self._office
        past = list(entries(office.journal)) if office.journal.exists() else []
        with Journal(office.journal) as journal:
            return serve(
                self._listener,
                office.settings,
                journal,
                past,
                self._store_at,
                attended=self._attended,
            )
