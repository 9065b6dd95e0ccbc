"""Connections to the coordinator: a member's, which reconnects, and `Reporter`.

    Conversation  a member's thread: sends what is due, receives messages, reconnects
    Backlog       the frames that have to arrive, kept until they are acknowledged
    Call          one connection, after the handshake
    Reporter      a connection in the role of a supervisor, without a thread; `echelon chaos` cuts
                  members off through it

The coordinator's listening socket outlives its process, so a member reconnects to the same address
and sends everything that is not acknowledged once more.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

from echelon.cluster.coordinator.protocol import (
    BEAT,
    LIMIT,
    RECORDS,
    VERSION,
    BadFrame,
    Decoder,
    Message,
    Seal,
    answer_to,
    encode,
    fresh_nonce,
    is_proof,
)
from echelon.comm.channel.sockets import close_in_children, stays_here
from echelon.comm.channel.stream import TAG
from echelon.core.errors import PeerError

_COMMITS = 0.1
"""Seconds between two frames of records, so that reports do not slow down short steps."""
_SOONEST, _LATEST = 0.02, 0.5
"""Seconds between two attempts to connect; doubled from the first to the second value."""
_GONE = 5.0
"""Seconds for which a connection may be refused."""
_LAST = 20.0
"""Seconds in which an attempt to connect has certainly ended."""
PATIENCE = 5.0
"""Seconds for the coordinator to answer, and for the kernel to take what is sent."""
_UNHEARD_MS = 10_000
"""Milliseconds without a TCP acknowledgment after which the kernel closes the connection."""
_CHUNK = 1 << 16


# A member's side.


class Conversation:
    """A thread that sends frames, receives messages and reconnects when the connection breaks."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        deadline: float,
        backlog: Backlog,
        party: Party,
    ) -> None:
        self._address, self._key, self._deadline = address, key, deadline
        self._backlog, self._party = backlog, party
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._awake = False
        self._arrived: dict[str, Any] | None = None
        """The arrival that was sent over the present connection."""
        self._beats_at = self._commits_at = 0.0
        self._call: Call | None = None
        self._thread = threading.Thread(target=self._run, name="echelon-liaison", daemon=True)

    def start(self) -> None:
        """Connect, say hello, and start the thread."""
        try:
            self._connect(first=True)
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look for frames to send. Almost free if it was woken already."""
        if not self._awake:
            self._awake = True
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Send nothing more and end the thread soon; the thread itself may call this."""
        self._stopping.set()

    def close(self) -> None:
        self.stop()
        if self._wake < 0 or threading.current_thread() is self._thread:
            return
        self.wake()
        if self._thread.is_alive():
            self._thread.join(_LAST)
        self._hang_up()
        handle, self._wake = self._wake, -1
        os.close(handle)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._talk()
                except (OSError, BadFrame):
                    self._hang_up()
                    if not self._stopping.is_set():
                        self._connect()
        except RunOver as error:
            self._party.over(error.why)
        except PeerError as error:
            self._party.over(str(error))
        except Exception as error:  # a bug in a callback: end the waits of other threads first
            self._party.over(f"the liaison broke down: {error!r}")
            raise
        finally:
            self._hang_up()

    def _talk(self) -> None:
        call = self._call
        assert call is not None
        poll = select.poll()
        poll.register(call.socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while not self._stopping.is_set():
            pause = self._say(call, time.monotonic())
            ready = [] if call.has_early else poll.poll(1000 * pause)
            if any(handle == self._wake for handle, _ in ready):
                os.eventfd_read(self._wake)
                self._awake = False  # after the read: frames added from here on wake again
            if call.has_early or any(handle != self._wake for handle, _ in ready):
                for message in call.receive():
                    self._party.heard(message)

    def _say(self, call: Call, now: float) -> float:
        """Send what is due; return the seconds until more is due."""
        if now >= self._beats_at:
            self._beats_at = now + BEAT
            call.send("beat", **self._party.beat())
        arrival = self._party.arrival
        records = self._party.tells_records and now >= self._commits_at
        for frame in self._backlog.frames(records=records or arrival is not None):
            call.send(**frame)
            if frame["kind"] == "commits":
                self._commits_at = now + _COMMITS
        if arrival is not None and arrival is not self._arrived:
            call.send("arrived", **arrival)
        self._arrived = arrival
        until = self._beats_at
        if self._backlog.waits(records=self._party.tells_records):
            until = min(until, self._commits_at)
        return max(0.0, until - now)

    def _connect(self, *, first: bool = False) -> None:
        """Connect, trying for as long as the deadline allows: the coordinator may be restarting."""
        began, pause = time.monotonic(), _SOONEST
        while not self._stopping.is_set():
            try:
                self._call = call = Call(self._address, self._key)
                self._party.introduce(call)
            except (Refused, RunOver):
                raise
            except (OSError, BadFrame) as error:
                self._hang_up()
                if first and isinstance(error, ConnectionRefusedError):
                    host, port = self._address
                    raise RunOver(f"nobody listens at {host}:{port}") from None
                self._check(began, error)
                self._stopping.wait(pause)
                pause = min(2 * pause, _LATEST)
            else:
                self._backlog.reconnected()
                self._arrived, self._beats_at, self._commits_at = None, 0.0, 0.0
                return

    def _check(self, began: float, error: Exception) -> None:
        """Raise when it has been tried for long enough."""
        # The listening socket outlives the coordinator, so a refused connection means that the run
        # is over. Wait a little all the same, because a network in between may refuse it, too.
        gone = isinstance(error, ConnectionRefusedError)
        patience = min(_GONE, self._deadline) if gone else self._deadline
        if time.monotonic() - began > patience:
            host, port = self._address
            raise PeerError(
                f"the coordinator at {host}:{port} could not be reached for {patience:g} s: {error}"
            )

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            with suppress(OSError):
                call.close()


class Party(Protocol):
    """The member on whose behalf a `Conversation` talks: its state and its handlers."""

    @property
    def arrival(self) -> dict[str, Any] | None:
        """The `arrived` message while the next generation is awaited, else None."""
        ...

    @property
    def tells_records(self) -> bool:
        """Whether it is this member that reports updates."""
        ...

    def introduce(self, call: Call) -> None: ...

    def beat(self) -> dict[str, Any]: ...

    def heard(self, message: Message) -> None: ...

    def over(self, why: str) -> None:
        """Take note that the coordinator cannot be reached any more, or that the run is over."""
        ...


class Backlog:
    """The frames that have to reach the coordinator, in order, until they are acknowledged.

    Thread-safe. Every member keeps records of updates, but only the leader sends them at once. The
    others send theirs when they leave their generation, so that none is missing if the leader is
    lost.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._items: list[Item] = []
        self._seq = 0

    def put(self, item: Item) -> Item:
        with self._lock:
            self._items.append(item)
        return item

    def report(self, generation: int, records: Sequence[Sequence[int]]) -> None:
        with self._lock:
            for at in range(0, len(records), RECORDS):
                part = [list(record) for record in records[at : at + RECORDS]]
                self._items.append(Item("commits", {"generation": generation, "records": part}))

    def frames(self, *, records: bool) -> list[Message]:
        """Return the frames to send now, and count them as sent; with or without `records`."""
        with self._lock:
            waiting = [item for item in self._items if not item.sent]
            # The coordinator ignores frames after a leave, so the records go before it.
            records |= any(item.kind == "leave" for item in waiting)
            due = [item for item in waiting if records or item.kind != "commits"]
            return [self._frame(group) for group in _groups(due)]

    def waits(self, *, records: bool) -> bool:
        """Return whether frames are waiting to be sent. Does not take the lock."""
        return any(not i.sent and (records or i.kind != "commits") for i in self._items)

    def acknowledged(self, seq: int) -> None:
        """Drop what was sent with this or a lower sequence number."""
        self._keep(lambda item: not item.sent or item.seq is None or item.seq > seq)

    def on_record(self, version: int) -> None:
        """Drop records up to `version`: the journal has them from another member."""
        self._keep(lambda item: item.kind != "commits" or item.last > version)

    def forget_records(self) -> None:
        """Drop all records: the updates were rolled back."""
        self._keep(lambda item: item.kind != "commits")

    def expelled(self) -> None:
        """Drop everything but a leave: the coordinator ignores what an expelled member did."""
        self._keep(lambda item: item.kind == "leave")

    def clear(self) -> None:
        self._keep(lambda _item: False)

    def reconnected(self) -> None:
        """Send everything again that is not acknowledged: it may have been lost."""
        with self._lock:
            for item in self._items:
                item.sent = False

    def holds(self, item: Item) -> bool:
        with self._lock:
            return any(kept is item for kept in self._items)

    def _frame(self, group: list[Item]) -> Message:
        seq = group[0].seq
        if seq is None:
            seq = self._seq = self._seq + 1
        for item in group:
            item.seq, item.sent = seq, True
        return {"kind": group[0].kind, **_joined(group), "seq": seq}

    def _keep(self, wanted: Callable[[Item], bool]) -> None:
        with self._lock:
            self._items = [item for item in self._items if wanted(item)]


@dataclass(slots=True)
class Item:
    """A frame to send. Items with records may be sent together as one frame."""

    kind: str
    fields: dict[str, Any]
    seq: int | None = None
    """Sequence number, given when it is first sent."""
    sent: bool = False
    """Whether it was sent over the present connection."""

    @property
    def last(self) -> int:
        """The version of its last record."""
        return int(self.fields["records"][-1][4])


def _groups(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Group items that go into one frame: the same ones as before, or ones that were never sent."""
    group: list[Item] = []
    for item in items:
        if group and not _fits(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _fits(group: Sequence[Item], item: Item) -> bool:
    first = group[0]
    if first.kind != "commits" or item.kind != "commits" or first.seq != item.seq:
        return False
    count = sum(len(member.fields["records"]) for member in group) + len(item.fields["records"])
    return first.fields["generation"] == item.fields["generation"] and count <= RECORDS


def _joined(group: Sequence[Item]) -> dict[str, Any]:
    if len(group) == 1:
        return group[0].fields
    records = [record for item in group for record in item.fields["records"]]
    return {**group[0].fields, "records": records}


# One connection.


class Call:
    """A connection on which both sides have proved that they know the key."""

    def __init__(self, address: tuple[str, int], key: bytes, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._where = f"{address[0]}:{address[1]}"
        self._decoder = Decoder()
        self._early: list[Message] = []
        self._seal: Seal | None = None
        self.socket = socket.socket()
        try:
            self._connect(address)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
            sealed = not stays_here(self.socket)
            fields, due, seal = answer_to(key, fresh_nonce(), sealed, self.next("challenge"))
            self.send("proof", **fields)
            self._seal = seal
            if not is_proof(self.next("proof").get("proof"), due):
                raise Refused(f"whoever listens at {self._where} does not know this run's key")
        except BaseException:
            self.close()
            raise

    def send(self, kind: str, **fields: Any) -> None:
        frame = encode(kind, **fields)
        self.socket.sendall(frame if self._seal is None else self._seal.closed([frame]))

    def receive(self) -> list[Message]:
        """Return the messages that have come; wait for at least some bytes."""
        if self._early:
            early, self._early = self._early, []
            return early
        data = self.socket.recv(_CHUNK)
        if not data:
            raise ConnectionResetError(f"the coordinator at {self._where} closed the connection")
        return list(self._opened(data))

    def _opened(self, data: bytes) -> Iterator[Message]:
        """Decode received bytes. The coordinator's proof is the last frame in plain text."""
        for message in self._decoder.feed(data):
            yield message
            if self._seal is not None and message["kind"] == "proof":
                self._decoder.opened = self._seal.opened
                self._decoder.limit = LIMIT + TAG

    def next(self, *kinds: str) -> Message:
        """Return the next message, which must be of one of these kinds; raise if refused."""
        until = time.monotonic() + self._patience
        while not self._early:
            if time.monotonic() > until:
                raise TimeoutError(f"the coordinator at {self._where} did not answer")
            self._early = self.receive()
        message = self._early.pop(0)
        if message["kind"] == "refused":
            if message.get("again"):
                raise ConnectionResetError(message.get("why"))
            raise Refused(f"the coordinator at {self._where} refused us: {message.get('why')}")
        if message["kind"] not in kinds:
            raise BadFrame(f"{message['kind']!r} from {self._where} where {kinds[0]!r} was due")
        return message

    @property
    def has_early(self) -> bool:
        """Whether more messages came together with the last one that `next` returned."""
        return bool(self._early)

    def close(self) -> None:
        """Close the connection. Runs also in children forked meanwhile (`close_in_children`)."""
        self.socket.close()

    def _connect(self, address: tuple[str, int]) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        for last, (family, kind, protocol, _, where) in enumerate(found, 1 - len(found)):
            self.socket.close()
            self.socket = socket.socket(family, kind, protocol)
            close_in_children(self)
            self.socket.settimeout(self._patience)
            try:
                self.socket.connect(where)
                return
            except OSError:
                if last == 0:
                    raise


class Refused(PeerError):
    """The coordinator refuses this process; trying again does not help."""


class RunOver(PeerError):
    """The run has ended, so there is nothing to take part in."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the run has ended: {why}")
        self.why = why


# In the role of a supervisor.


class Reporter:
    """A connection in the role of a supervisor: reports ended processes, and cuts members off.

    It has no thread, and never waits longer than `patience` seconds. A report that fails, because
    the coordinator is dead or just starting, is sent with the next one or by `flush`.
    """

    def __init__(self, address: tuple[str, int], key: bytes, *, patience: float = 0.5) -> None:
        self._address, self._key, self._patience = address, key, patience
        self._untold: deque[dict[str, Any]] = deque()
        self._call: Call | None = None

    def gone(self, pid: int, status: int) -> bool:
        """Report a child's end with its exit code or minus the signal; return as `flush` does."""
        self._untold.append({"kind": "gone", "pid": pid, "status": status})
        return self.flush()

    def drop(self, member: int, seconds: float) -> bool:
        """Cut a member off from the coordinator for a while; return as `flush` does."""
        self._untold.append({"kind": "drop", "member": member, "seconds": seconds})
        return self.flush()

    def flush(self) -> bool:
        """Send what is left to report; return whether all was sent."""
        try:
            while self._untold:
                self._connected().send(**self._untold[0])
                self._untold.popleft()
        except (OSError, BadFrame):
            self.close()
            return False
        return True

    def close(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            with suppress(OSError):
                call.close()

    def _connected(self) -> Call:
        if self._call is not None and _is_broken(self._call.socket):
            self.close()
        if self._call is None:
            call = self._call = Call(self._address, self._key, self._patience)
            who = {"role": "supervisor", "pid": os.getpid(), "host": "", "name": "supervisor"}
            call.send("hello", version=VERSION, generation=0, **who)
            call.next("welcome")
        return self._call


def _is_broken(connection: socket.socket) -> bool:
    """Return whether the other side has closed the connection, as that of a killed coordinator."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
