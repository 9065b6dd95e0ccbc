"""The member processes of one machine: forked, connected by pipes, signaled and reaped.

    supervisor ── fork ──▶ member 0 … N-1, each in its own process group
        ▲  ▲                  │     │
        │  └── JSON lines ────┘     │   facts, then its result or its error: one pipe per member
        └───── heartbeats ──────────┘   step and activity, in shared memory (`health.Pulses`)
    members 1 … ── output ──▶ member 0 ──▶ stderr, each line with its member's number in front

In the parent, `Crew` holds one `Child` per member. In the child, `live` turns the fork into a
process of its own, calls the work with a `Member`, and reports the end. `Pipes` are the descriptors
between them, and `Relay` prints what the members print.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from echelon.cluster import environment
from echelon.cluster.environment import held_back, stay_on_loopback
from echelon.cluster.health import Pulses, fault_of
from echelon.comm.peers import Place
from echelon.core.errors import TrainingError
from echelon.core.process import keep_freed_memory

_UNKILLABLE_SECONDS = 2.0
"""Seconds for killed members to end; one that does not hangs in the kernel and is left behind."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_HOST = "127.0.0.1"
_CHUNK = 1 << 16
"""The capacity of a pipe."""
_JOIN_SECONDS = 1.0


# In the parent: the members as processes.


class Crew:
    """All member processes of a run on this machine, seen from their parent."""

    def __init__(self, count: int, besides: Iterable[int] = ()) -> None:
        self.count = count
        try:
            self.pipes = Pipes(count, besides)
        except OSError as error:
            raise _refused(f"{count} members", error) from None
        self.children: list[Child] = []

    @property
    def alive(self) -> list[Child]:
        return [child for child in self.children if child.status is None]

    def start(self, work: Work, pulses: Pulses, deadline: float) -> None:
        """Fork every member."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()  # else each member would print the buffered text again
        gc.freeze()  # a collection in a member would write to all objects, and so copy their pages
        try:
            with held_back():
                for index in range(self.count):
                    self._fork(index, work, pulses, deadline)
        except OSError as error:
            raise _refused(f"member {len(self.children)} of {self.count}", error) from None
        finally:
            gc.unfreeze()
        self.pipes.keep_reading()

    def signal(self, number: int) -> None:
        for child in self.alive:
            child.signal(number)

    def signal_groups(self, number: int) -> None:
        for child in self.alive:
            child.signal_group(number)

    def close(self) -> None:
        """Kill and reap all members that are left."""
        self.signal(signal.SIGKILL)
        patience = time.monotonic() + _UNKILLABLE_SECONDS
        for child in self.alive:
            if _ended(child.handle, patience - time.monotonic()):
                child.reap()
        self.pipes.close()

    def _fork(self, index: int, work: Work, pulses: Pulses, deadline: float) -> None:
        listener = self.pipes.listener if index == 0 else None
        place = Place(
            index=index,
            count=self.count,
            port=self.pipes.port,
            listener=listener,
            deadline=deadline,
        )
        member = Member(place, self.pipes.wires[index], pulses)
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            live(member, work, self.pipes, supervisor)
        self.children.append(Child(index, pid, self._handle(pid)))

    def _handle(self, pid: int) -> int:
        try:
            return self.pipes.own(os.pidfd_open(pid))
        except OSError:  # without a pidfd the member could not be watched or ended later
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise


@dataclass(slots=True)
class Child:
    """One member's process, seen from its parent."""

    index: int
    pid: int
    handle: int
    """The process's pidfd: readable once it has ended; a signal sent through it cannot hit another
    process that got the same pid."""
    sent: set[int] = field(default_factory=set)
    """Signals that the parent has sent to it."""
    status: int | None = None
    """Exit code, or minus the signal that ended it; None while it lives."""

    def signal(self, number: int) -> None:
        if self.status is None:
            self.sent.add(number)
            with suppress(ProcessLookupError):  # ended, not reaped yet
                signal.pidfd_send_signal(self.handle, number)

    def signal_group(self, number: int) -> None:
        """Signal the process and all it started. Its pid is not reused before it is reaped."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def reap(self) -> None:
        """Record the status of the ended process, and kill what it left running in its group."""
        self.signal_group(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)


def _refused(what: str, error: OSError) -> TrainingError:
    hint = " (ulimit -n says how many)" if error.errno == errno.EMFILE else ""
    return TrainingError(f"{what} could not be started: {error.strerror}{hint}")


def _ended(handle: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


# In the forked process.


class Member:
    """What the work of one process gets: its place in the group, and two ways to report."""

    __slots__ = ("_doing", "_lock", "_pulses", "_wire", "place")

    def __init__(self, place: Place, wire: int, pulses: Pulses) -> None:
        self.place = place
        self._wire = wire
        self._pulses = pulses
        self._doing = ""
        self._lock = threading.Lock()

    def tell(self, **facts: Any) -> None:
        """Send facts (plain JSON data) to the supervisor, which keeps them if this process dies."""
        self.send(encoded("told", facts))

    def pulse(self, step: int, doing: str) -> None:
        """Write a heartbeat: the step and what it is doing. Cheap enough for every step."""
        index = self.place.index
        if doing is not self._doing:  # usually the same literal, so identity is enough
            self._pulses.describe(index, doing)
            self._doing = doing
        self._pulses.beat(index, step)

    def send(self, line: bytes) -> None:
        """Send one line to the supervisor. Thread-safe."""
        rest = memoryview(line)
        with self._lock:
            while rest:
                rest = rest[os.write(self._wire, rest) :]


Work = Callable[[Member], Mapping[str, Any]]
"""What a member does in its process; returns plain JSON data."""


def live(member: Member, work: Work, pipes: Pipes, supervisor: int) -> NoReturn:
    """Do the work and report how it ended. Never returns: the caller's stack is the parent's."""
    code = 1
    try:
        try:
            code, last = _outcome(member, work, pipes, supervisor)
        except KeyboardInterrupt as error:  # a second one, while the first was being reported
            environment.deaf()
            last = encoded("error", fault_of(error))
        member.send(last)
    finally:
        os._exit(code)  # skip the exit handlers: they are the parent's


def _outcome(member: Member, work: Work, pipes: Pipes, supervisor: int) -> tuple[int, bytes]:
    """Do the work; return the exit code and the last line for the supervisor."""
    place = member.place
    try:
        with closing(_settle(place.index, pipes, supervisor)):
            environment.as_new()
            result = work(member)
            environment.deaf()
            _flush()
        return 0, encoded("result", result)
    except BaseException as error:
        environment.deaf()
        _flush()
        if error.__traceback__ is not None:  # leave this frame out of the traceback
            error.__traceback__ = error.__traceback__.tb_next
        return 1, encoded("error", fault_of(error))


def encoded(kind: str, content: Mapping[str, Any]) -> bytes:
    """Return a line in the form that the supervisor reads: {kind: content}."""
    return json.dumps({kind: dict(content)}).encode() + b"\n"


def _settle(index: int, pipes: Pipes, supervisor: int) -> RelayThread:
    """Turn the fork into a process of its own: group, descriptors, stdin and output."""
    die_with(supervisor)
    os.setpgid(0, 0)
    pipes.keep_only(index)
    stay_on_loopback()
    keep_freed_memory()
    _close_stdin()
    if index != 0:
        _speak_through(pipes.voices[index])
    return RelayThread(Relay(pipes.texts if index == 0 else {}))


def _close_stdin() -> None:
    """Read from /dev/null. A process outside the terminal's foreground group that read from the
    terminal would be stopped."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _speak_through(voice: int) -> None:
    """Send stdout and stderr, of Python and of native code, into this pipe, line by line."""
    os.dup2(voice, 1)
    os.dup2(voice, 2)
    out = open(voice, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    sys.stdout = sys.stderr = out


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()


def die_with(supervisor: int) -> None:
    """Have the kernel kill this process when its parent `supervisor` ends, however that happens."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != supervisor:  # the parent ended before the call
        os._exit(1)


def only(work: Callable[[], int | None]) -> NoReturn:
    """Call `work` in a forked process and exit with the code it returns (None: 0; error: 1)."""
    code = 1
    try:
        code = work() or 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


# What connects the two.


class Pipes:
    """The descriptors between a supervisor and its members, made before the first fork.

    Each process keeps its own ends and closes all others.

    | | written by | read by |
    |---|---|---|
    | `wires` → `reports` | each member: facts, then its result or error | the supervisor |
    | `voices` → `texts` | members 1 …: what they print | member 0, then the supervisor |
    | `listener` | – | member 0: serves the store where members find each other |
    """

    def __init__(self, count: int, besides: Iterable[int] = ()) -> None:
        """`besides` are descriptors of the parent that members close and the parent keeps."""
        self._besides = tuple(besides)
        self._open: set[int] = set()
        self.wires: dict[int, int] = {}
        self.reports: dict[int, int] = {}
        self.voices: dict[int, int] = {}
        self.texts: dict[int, int] = {}
        try:
            for index in range(count):
                self.reports[index], self.wires[index] = self._pipe()
            for index in range(1, count):
                self.texts[index], self.voices[index] = self._pipe()
            self.listener, self.port = self._listen(count)
        except BaseException:
            self.close()
            raise

    def own(self, descriptor: int) -> int:
        """Close this descriptor too: here in `close`, and in every member forked from now on."""
        self._open.add(descriptor)
        return descriptor

    def keep_only(self, index: int) -> None:
        """In a member: close the descriptors of all other processes."""
        kept = {self.wires[index]}
        kept |= {self.listener, *self.texts.values()} if index == 0 else {self.voices[index]}
        self._close(self._open - kept)
        for descriptor in self._besides:
            os.close(descriptor)

    def keep_reading(self) -> None:
        """In the supervisor, once all members are forked: close the members' ends."""
        self._close({*self.wires.values(), *self.voices.values(), self.listener})

    def close(self) -> None:
        self._close(set(self._open))

    def _close(self, descriptors: set[int]) -> None:
        for descriptor in descriptors & self._open:
            self._open.discard(descriptor)
            os.close(descriptor)

    def _pipe(self) -> tuple[int, int]:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        return self.own(reader), self.own(writer)

    def _listen(self, count: int) -> tuple[int, int]:
        with socket.create_server((_HOST, 0), backlog=max(64, 2 * count)) as server:
            port: int = server.getsockname()[1]
            return self.own(server.detach()), port


class Relay:
    """Prints the output of members 1 … on stderr, in whole lines with the member's number in front.

    Member 0 runs it, because only member 0 knows where its progress bar is (a bar that is being
    drawn takes over `sys.stderr`). Once member 0 has ended the supervisor runs it. All output goes
    to stderr: stdout is for results.
    """

    def __init__(self, sources: Mapping[int, int]) -> None:
        self.sources = {descriptor: member for member, descriptor in sources.items()}
        self._partial = dict.fromkeys(sources.values(), b"")

    def read(self, descriptor: int) -> bool:
        """Print the lines that are there, without blocking; return whether more may come."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        *lines, self._partial[descriptor] = (self._partial[descriptor] + chunk).split(b"\n")
        for line in lines:
            self._print(descriptor, line)
        return bool(chunk)

    def finish(self) -> None:
        """Print what is left in the pipes, including unfinished lines."""
        for descriptor in self.sources:
            self.read(descriptor)
            if rest := self._partial[descriptor]:
                self._print(descriptor, rest)
                self._partial[descriptor] = b""

    def _print(self, descriptor: int, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        with suppress(OSError, ValueError):  # stderr is closed
            print(f"[{self.sources[descriptor]}] {text}", file=sys.stderr, flush=True)


class RelayThread:
    """A thread that runs the relay beside the work of member 0. Without sources it does nothing."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._stop = os.eventfd(0)
        self._thread: threading.Thread | None = None
        if relay.sources:
            self._thread = threading.Thread(target=self._work, name="echelon-relay", daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            for descriptor in self._relay.sources:
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._stop:
                        self._relay.finish()
                        return
                    if not self._relay.read(key.fd):
                        selector.unregister(key.fd)
