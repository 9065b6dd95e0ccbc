"""ServiceProcess: coordinator and servers, listening sockets, restarts.

Keeps a coordinator running: if it ends, another one takes over where its journal ends.

The listening socket belongs to the supervisor. Members that reach out while there is no coordinator
wait in its queue, and find the next one at the same address. The store where the members of a
generation find each other is the supervisor's own: it outlives coordinators.
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

# --- keeper ---

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
        environment.as_new()
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


# --- fleet ---
# Keeps a run's parameter servers running: a process for each shard, and its twin if it has one.
#
# a shard ends                   ─▶ another process at its address, empty; trainers see to the rest
# a shard ends that has a twin   ─▶ SIGUSR1: the twin takes its place ─▶ a new twin
# a twin ends                    ─▶ a new twin, which the shard brings up to date
# one is stopped (SIGSTOP)       ─▶ after 1.25 s it is ended, and all is as above
#
# The listening sockets belong to the supervisor: whoever reaches out meanwhile waits in their
# queue.

SERVERS = "servers.json"
"""The file in a run's folder that says which process serves which shard, while it lasts."""
PROMOTE = signal.SIGUSR1
_FLEET_END_SECONDS = 2.0
_FLEET_MOST_IN_ROW, _FLEET_ROW_SECONDS = 5, 10.0
"""A shard that ends so often within so many seconds will not get any better."""


@dataclass(slots=True)
class Seat:
    """One process that serves a shard, or stands by as its twin."""

    shard: int
    twin: bool
    pid: int = 0
    handle: int = -1
    """Its pidfd: readable once it has ended."""
    stopped: float | None = None
    """Since when it is known to stand still."""

    def __str__(self) -> str:
        return f"the twin of server {self.shard}" if self.twin else f"server {self.shard}"

    def signal(self, number: int) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, number)

    def reap(self) -> int:
        """It has ended: how."""
        os.close(self.handle)
        _, status = os.waitpid(self.pid, 0)
        self.pid, self.handle = 0, -1
        return os.waitstatus_to_exitcode(status)


@dataclass(slots=True)
class Berth:
    """A shard's address, and who serves there."""

    address: ShardAddress
    listeners: list[socket.socket]
    seats: list[Seat]
    starts: list[float] = field(default_factory=list)


class Fleet:
    """All server processes of a run, as the supervisor holds them."""

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
        """Fork all; `besides` closes in each what is not its own."""
        self._besides = besides
        for berth in self._berths:
            for seat in berth.seats:
                self._fork(berth, seat)
        self._write()

    def replace(self, seat: Seat, besides: Callable[[], None]) -> str:
        """A process has ended, and the seat is taken by another one: says what was done."""
        self._besides = besides
        how, berth = _how(seat.reap()), self._berths[seat.shard]
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
        """Whoever stands still for long is ended, as it holds all others up: says who was."""
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
        """End all of them, and let nobody reach out any more."""
        for berth in self._berths:
            for listener in berth.listeners:
                listener.close()
        if os.getpid() != self._supervisor:
            return
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + _FLEET_END_SECONDS
        for seat in self.seats:
            while os.waitid(os.P_PIDFD, seat.handle, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                if time.monotonic() > deadline:
                    seat.signal(signal.SIGKILL)
                    break
                time.sleep(0.005)
            seat.reap()
        self._file.unlink(missing_ok=True)

    def _fork(self, berth: Berth, seat: Seat) -> None:
        now = time.monotonic()
        most = _FLEET_MOST_IN_ROW * len(berth.seats)
        berth.starts = [*berth.starts, now][-most:]
        if len(berth.starts) == most and now - berth.starts[0] < _FLEET_ROW_SECONDS:
            raise TrainingError(f"{seat} ended {most} times in {_FLEET_ROW_SECONDS:g} s")
        # Whoever is promoted before it is ready for it hears of it when it is.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {PROMOTE})
        try:
            seat.pid = os.fork()
            if seat.pid == 0:
                only(lambda: self._serve(berth, seat))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        seat.handle = os.pidfd_open(seat.pid)

    def _serve(self, berth: Berth, seat: Seat) -> None:
        """In the server's process, where `PROMOTE` is held back until it is let in."""
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

    def _write(self) -> None:
        """For whoever wants to know: tests, chaos, people."""
        found = [{"shard": s.shard, "twin": s.twin, "pid": s.pid} for s in self.seats]
        write_atomic(self._file, json.dumps(found))


def served(folder: Path) -> list[dict[str, Any]]:
    """Which process serves which shard of the run in this folder; nothing if none is under way."""
    try:
        found: list[dict[str, Any]] = json.loads((folder / SERVERS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return found


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
    """While servers apply an update that all make together, the trainers wait for them."""
    section, cores = job.parameter_server, torch.get_num_threads()
    shared = section.servers if section.together else section.servers + job.workers
    return job.threads or max(1, cores // shared)


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


# --- listening ---
# Where the supervisor listens on behalf of the coordinator and the servers.

BACKLOG = 1024


def listening(section: str, host: str) -> socket.socket:
    """A socket at a free port of `host`, which is the address that this section gives."""
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


def check_addresses(job: Job) -> None:
    """Before there is a run that would be left behind: can anybody listen where the job says?"""
    listening("elastic", job.elastic.address).close()
    if strategy.has_servers(job):
        listening("parameter_server", job.parameter_server.address).close()
