"""The processes of an elastic run that are not members: the coordinator and parameter servers.

The supervisor starts them before its members and starts them again when they end:

    coordinator ends                  another process continues from the journal
    server without a replica ends     an empty process at the same address; trainers restore it
    server with a replica ends        SIGUSR1 promotes the replica; a new replica is started
    replica ends                      a new replica, which its server brings up to date
    server stopped (SIGSTOP)          killed after 1.25 s, then as if it had ended

The listening sockets belong to the supervisor. A peer that connects while a process is being
replaced waits in the socket's queue and reaches the next process at the same address. The store
where the members of a generation exchange their addresses runs in the supervisor itself, so it
outlives coordinators.

The code calls a replica `twin`, a process's role for a shard `Seat`, and a shard's address with its
processes `Berth`.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from echelon import strategy
from echelon.cluster import environment
from echelon.cluster.coordinator import Settings, serve
from echelon.cluster.workers import die_with, only
from echelon.comm.channel.connection import STOPPED, is_stopped
from echelon.comm.ps.messages import ShardAddress
from echelon.core.config import Job
from echelon.core.errors import ConfigError, TrainingError
from echelon.core.files import write_atomic
from echelon.core.process import keep_freed_memory
from echelon.data.journal import Journal, entries

_END_SECONDS = 2.0
"""Seconds for a process to end after SIGTERM, before SIGKILL."""
_MOST_IN_ROW, _ROW_SECONDS = 5, 10.0
"""A server that is started this often within this many seconds will not last: give up."""
MOST_STARTS, WINDOW_SECONDS = 20, 60.0
"""The same for the coordinator. It may be killed more often: its restart costs the run nothing."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
"""Seconds before the second restart within the window, and the bound to which they double. So a
coordinator that fails for a passing reason, such as a full disk, has half a minute to recover."""
_STOPPED = 1
"""The exit code of a coordinator that ends before the run is over."""
SERVERS = "servers.json"
"""The file in a run's folder that says which process serves which shard, while the run lasts."""
PROMOTE = signal.SIGUSR1
"""Makes a replica take over its shard."""
BACKLOG = 1024
"""Connections that may wait while a process is being replaced: every member may reconnect then."""


@dataclass(frozen=True, slots=True)
class Office:
    """What every coordinator process of a run needs; `address` is the host it listens on."""

    settings: Settings
    journal: Path
    address: str


class Keeper:
    """The coordinator's process as the supervisor manages it."""

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
        """The process's pidfd: readable once it has ended."""
        self._starts: list[float] = []

    def start(self, besides: Callable[[], None]) -> None:
        """Fork a coordinator, which calls `besides` to close descriptors that are not its own."""
        now = time.monotonic()
        self._starts = [*(at for at in self._starts if now - at < WINDOW_SECONDS), now]
        pause = pause_before(len(self._starts))
        supervisor = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            only(lambda: 0 if self._serve(besides, supervisor, pause) else _STOPPED)
        self.handle = os.pidfd_open(self.pid)

    def _serve(self, besides: Callable[[], None], supervisor: int, pause: float) -> bool:
        """Serve in the coordinator's process; return whether the run is over."""
        die_with(supervisor)
        os.setpgid(0, 0)
        besides()
        environment.as_new()
        time.sleep(pause)  # here, because the supervisor must not wait
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

    def serve_store(self) -> None:
        """Serve the store. Call it once all members are forked: it starts a thread."""
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

    def leave_alone(self) -> None:
        """Tell the coordinator that no member started here is left.

        It then ends the run once members that joined from elsewhere are gone, too.
        """
        self._attended = False
        # A coordinator that has no handler for it yet is killed by it, and started again.
        self.signal(signal.SIGUSR1)

    def ending(self) -> str | None:
        """Return the status that the coordinator journaled for the run's end; None before that."""
        status = None
        for entry in entries(self._office.journal):
            status = {"begun": None, "finished": entry.get("status")}.get(entry["kind"], status)
        return status

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)

    def reap(self) -> int:
        """Reap the ended process; return its exit code or minus its signal. 0: the run is over."""
        os.close(self.handle)
        _, status = os.waitpid(self.pid, 0)
        self.pid, self.handle = 0, -1
        return os.waitstatus_to_exitcode(status)

    def shut(self) -> None:
        """Stop listening: peers that still connect are refused instead of waiting."""
        self._listener.close()

    def close(self) -> None:
        """End the coordinator and stop listening."""
        self.shut()
        self._store = None
        if self._meeting is not None:
            self._meeting.close()
        if not self.pid:
            return
        self.signal(signal.SIGTERM)
        _wait_or_kill(self, time.monotonic() + _END_SECONDS)


def pause_before(starts: int) -> float:
    """Return the seconds before the coordinator's next start, the `starts`-th within the window."""
    if starts >= MOST_STARTS:
        raise TrainingError(f"the coordinator ended {starts - 1} times in {WINDOW_SECONDS:g} s")
    if starts <= 2:  # one restart is normal
        return 0.0
    return min(_LONGEST_PAUSE, float(_FIRST_PAUSE * 2 ** (starts - 3)))


class Fleet:
    """All server processes of a run as the supervisor manages them."""

    def __init__(self, job: Job, key: bytes, journal: Path) -> None:
        self._job, self._key = job, key
        self._file = journal.with_name(SERVERS)
        self._supervisor = os.getpid()
        self._besides: Callable[[], None] = lambda: None
        self._berths: list[Berth] = []
        section = job.parameter_server
        word = secrets.token_hex(8)
        try:
            for shard in range(section.servers):
                self._berths.append(_berth(shard, word, section.address, section.replicas))
        except OSError as error:
            self.close()
            raise TrainingError(
                f"{section.servers} servers cannot be started: {error.strerror}"
            ) from None
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> tuple[ShardAddress, ...]:
        return tuple(berth.address for berth in self._berths)

    @property
    def seats(self) -> list[Seat]:
        return [seat for berth in self._berths for seat in berth.seats if seat.pid]

    def start(self, besides: Callable[[], None]) -> None:
        """Fork all servers; each calls `besides` to close descriptors that are not its own."""
        self._besides = besides
        for berth in self._berths:
            for seat in berth.seats:
                self._fork(berth, seat)
        self._write()

    def _fork(self, berth: Berth, seat: Seat) -> None:
        now = time.monotonic()
        most = _MOST_IN_ROW * len(berth.seats)
        berth.starts = [*berth.starts, now][-most:]
        if len(berth.starts) == most and now - berth.starts[0] < _ROW_SECONDS:
            raise TrainingError(f"{seat} ended {most} times in {_ROW_SECONDS:g} s")
        # The signal stays blocked until the server has a handler for it: a replica that is promoted
        # earlier would be killed by it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {PROMOTE})
        try:
            seat.pid = os.fork()
            if seat.pid == 0:
                only(lambda: self._serve(berth, seat))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        seat.handle = os.pidfd_open(seat.pid)

    def _serve(self, berth: Berth, seat: Seat) -> None:
        """Serve in the server's process. `PROMOTE` is blocked until the server unblocks it."""
        die_with(self._supervisor)
        os.setpgid(0, 0)
        self._besides()
        for other in self._berths:
            for descriptor in [s.handle for s in other.seats if s.handle >= 0]:
                os.close(descriptor)
            for listener in other.listeners if other is not berth else ():
                listener.close()
        environment.as_new()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        keep_freed_memory()
        torch.set_num_threads(_threads(self._job))
        from echelon.server.process import serve
        from echelon.server.shard import ServerSettings

        serve(
            berth.listeners,
            ServerSettings(
                shard=seat.shard,
                shards=self.addresses,
                key=self._key,
                deadline=self._job.sync.deadline,
                twin=seat.twin,
            ),
        )

    def replace(self, seat: Seat, besides: Callable[[], None]) -> str:
        """Replace an ended process, by its replica if it has one; return a sentence about it."""
        self._besides = besides
        how, berth = describe_exit(seat.reap()), self._berths[seat.shard]
        spare = next((other for other in berth.seats if other is not seat and other.pid), None)
        said = f"{seat} ended ({how}); another one takes its place"
        if spare is not None and not seat.twin:
            said = f"{seat} ended ({how}); its twin takes over"
            seat.twin, spare.twin = True, False
            spare.signal(PROMOTE)
        self._fork(berth, seat)
        self._write()
        return said

    def end_frozen(self) -> list[str]:
        """Kill processes that have been stopped for too long; return a sentence about each.

        A stopped server holds up every trainer.
        """
        now, said = time.monotonic(), []
        for seat in self.seats:
            if not is_stopped(seat.pid):
                seat.stopped = None
            elif seat.stopped is None:
                seat.stopped = now
            elif now - seat.stopped > STOPPED:
                seat.stopped = None
                seat.signal(signal.SIGKILL)
                said.append(f"{seat} stood still for {STOPPED:g} s: it is ended")
        return said

    def signal(self, number: int) -> None:
        for seat in self.seats:
            seat.signal(number)

    def close(self) -> None:
        """End all servers and stop listening."""
        for berth in self._berths:
            for listener in berth.listeners:
                listener.close()
        if os.getpid() != self._supervisor:
            return
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + _END_SECONDS
        for seat in self.seats:
            _wait_or_kill(seat, deadline)
        self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        """Write down which process serves which shard, for `served` and for people."""
        found = [{"shard": s.shard, "twin": s.twin, "pid": s.pid} for s in self.seats]
        write_atomic(self._file, json.dumps(found))


@dataclass(slots=True)
class Berth:
    """A shard: its address, listening sockets and processes."""

    address: ShardAddress
    listeners: list[socket.socket]
    seats: list[Seat]
    starts: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Seat:
    """The process that serves a shard, or its replica. Replaced processes keep the same object."""

    shard: int
    twin: bool
    pid: int = 0
    handle: int = -1
    """The process's pidfd: readable once it has ended."""
    stopped: float | None = None
    """Since when the process is seen stopped (SIGSTOP)."""

    def __str__(self) -> str:
        return f"the twin of server {self.shard}" if self.twin else f"server {self.shard}"

    def signal(self, number: int) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, number)

    def reap(self) -> int:
        """Reap the ended process; return its exit code or minus its signal."""
        os.close(self.handle)
        _, status = os.waitpid(self.pid, 0)
        self.pid, self.handle = 0, -1
        return os.waitstatus_to_exitcode(status)


def _berth(shard: int, word: str, host: str, replicas: int) -> Berth:
    tcp = listening("parameter_server", host)
    name = f"echelon-{word}-{shard}"
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        near.bind(f"\0{name}")
        near.listen(BACKLOG)
    except BaseException:
        near.close()
        tcp.close()
        raise
    seats = [Seat(shard, twin=bool(twin)) for twin in range(1 + replicas)]
    return Berth(ShardAddress(shard, host, tcp.getsockname()[1], name), [tcp, near], seats)


def _threads(job: Job) -> int:
    """Return the number of threads of a server.

    Servers get all cores if updates are synchronous, because the trainers wait for them meanwhile.
    """
    section, cores = job.parameter_server, torch.get_num_threads()
    shared = section.servers if section.together else section.servers + job.workers
    return job.threads or max(1, cores // shared)


def served(folder: Path) -> list[dict[str, Any]]:
    """Return the server processes of the run in this folder: shard, twin and pid of each.

    Empty if the run has no servers or is not under way.
    """
    try:
        found: list[dict[str, Any]] = json.loads((folder / SERVERS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return found


def _wait_or_kill(process: Keeper | Seat, deadline: float) -> None:
    """Reap a process once it has ended; kill it if it has not by `deadline` (monotonic time)."""
    while os.waitid(os.P_PIDFD, process.handle, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            process.signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    process.reap()


def describe_exit(status: int) -> str:
    """Return a process's exit code, or minus the signal that ended it, as text."""
    return f"signal {-status}" if status < 0 else f"exit code {status}"


def check_addresses(job: Job) -> None:
    """Check that the configured addresses can be listened on, before a run is recorded."""
    listening("elastic", job.elastic.address).close()
    if strategy.has_servers(job):
        listening("parameter_server", job.parameter_server.address).close()


def listening(section: str, host: str) -> socket.socket:
    """Return a listening socket at a free port of `host`, the `address` of this config section."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        opened.bind((host, 0))
        opened.listen(BACKLOG)
    except (OSError, TypeError) as error:  # TypeError: no name at all
        opened.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{section}.address = {host!r}: nothing can listen there ({reason}); give an IPv4 "
            f"address or a name of this machine",
            (section, "address"),
        ) from None
    except BaseException:
        opened.close()
        raise
    return opened
