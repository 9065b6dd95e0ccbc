"""Reconnecting connection, unacknowledged messages."""

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

from echelon.cluster.coordinator.membership import BEAT
from echelon.cluster.coordinator.protocol import (
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

# --- conversation ---
# The liaison's thread: one connection to the coordinator, made anew when it breaks.

_COMMITS = 0.1
"""Seconds between two frames of records, so that quick steps are not slowed by telling of them."""
_SOONEST, _LATEST = 0.02, 0.5
"""Seconds between two attempts to connect."""
_GONE = 5.0
"""Seconds for which a connection may be refused."""
_LAST = 20.0
"""Seconds in which an attempt to connect is over."""


class Party(Protocol):
    """On whose behalf the conversation is held."""

    @property
    def arrival(self) -> dict[str, Any] | None:
        """What to say of having left a generation, as long as the next is awaited."""
        ...

    @property
    def tells_records(self) -> bool:
        """Whether it is this member that reports updates."""
        ...

    def introduce(self, call: Call) -> None: ...

    def beat(self) -> dict[str, Any]: ...

    def heard(self, message: Message) -> None: ...

    def over(self, why: str) -> None:
        """There is nobody to talk to any more."""
        ...


class Conversation:
    """Says what is to be said, hears what is said, and holds the line."""

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
        """What was sent of it over the present connection."""
        self._beats_at = self._commits_at = 0.0
        self._call: Call | None = None
        self._thread = threading.Thread(target=self._run, name="echelon-liaison", daemon=True)

    def start(self) -> None:
        """Connect, be welcomed, and go on in a thread."""
        try:
            self._connect(first=True)
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def wake(self) -> None:
        """There is something to say. Costs next to nothing if that is known."""
        if not self._awake:
            self._awake = True
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Say nothing more; may be called by the thread itself."""
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
        except Exception as error:  # a callback's, so a bug: nobody is to wait for us in vain
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
                self._awake = False  # in this order: what is added from here on wakes again
            if call.has_early or any(handle != self._wake for handle, _ in ready):
                for message in call.receive():
                    self._party.heard(message)

    def _say(self, call: Call, now: float) -> float:
        """Send what is due; returns in how many seconds there is more."""
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
        """Try for as long as the deadline allows: the coordinator may be starting again."""
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
        # Its socket outlives a coordinator: where nobody listens, nobody will. Whoever was there
        # before waits a little all the same: there may be a network in between.
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


# --- call ---
# A connection to the coordinator, from the other side.

_CHUNK = 1 << 16
PATIENCE = 5.0
"""Seconds for the coordinator to answer, and for the kernel to take what is sent."""
_UNHEARD_MS = 10_000
"""Milliseconds after which a connection is broken that takes what is sent nowhere."""


class Refused(PeerError):
    """The coordinator does not want to talk to us; trying again does not help."""


class RunOver(PeerError):
    """There is nothing left to take part in."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the run has ended: {why}")
        self.why = why


class Call:
    """Connected, and both sides have shown that they know the key."""

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
        """What has come; waits for something."""
        if self._early:
            early, self._early = self._early, []
            return early
        data = self.socket.recv(_CHUNK)
        if not data:
            raise ConnectionResetError(f"the coordinator at {self._where} closed the connection")
        return list(self._opened(data))

    def _opened(self, data: bytes) -> Iterator[Message]:
        """The coordinator's proof is the last frame that is not encrypted."""
        for message in self._decoder.feed(data):
            yield message
            if self._seal is not None and message["kind"] == "proof":
                self._decoder.opened = self._seal.opened
                self._decoder.limit = LIMIT + TAG

    def next(self, *kinds: str) -> Message:
        """The next frame, which is of one of these kinds unless we are refused."""
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
        """Whether frames came with the last one that was awaited."""
        return bool(self._early)

    def close(self) -> None:
        """Also in a child that was forked meanwhile: the connection is not its own."""
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


# --- backlog ---
# What has to reach the coordinator: kept, in order, until it is known to be there.


@dataclass(slots=True)
class Item:
    """A frame, or with others of its kind a part of one."""

    kind: str
    fields: dict[str, Any]
    seq: int | None = None
    """Given when it is first sent."""
    sent: bool = False
    """Over the present connection."""

    @property
    def last(self) -> int:
        """Version of the last of its records."""
        return int(self.fields["records"][-1][4])


class Backlog:
    """Used by two threads.

    Records of updates are kept by everybody and sent by the leader alone; the others send them
    when they leave their generation, so that nothing is missing if the leader is.
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
        """What is to be sent now and counts as sent; `records` too or only the rest."""
        with self._lock:
            waiting = [item for item in self._items if not item.sent]
            # After a leave nothing counts any more: the records go before it.
            records |= any(item.kind == "leave" for item in waiting)
            due = [item for item in waiting if records or item.kind != "commits"]
            return [self._frame(group) for group in _groups(due)]

    def waits(self, *, records: bool) -> bool:
        """Whether something is to be sent that was not; looked at without waiting for the lock."""
        return any(not i.sent and (records or i.kind != "commits") for i in self._items)

    def acknowledged(self, seq: int) -> None:
        """What was sent up to this number has come through."""
        self._keep(lambda item: not item.sent or item.seq is None or item.seq > seq)

    def on_record(self, version: int) -> None:
        """Up to this version, another one has told of the updates as well."""
        self._keep(lambda item: item.kind != "commits" or item.last > version)

    def forget_records(self) -> None:
        """What they tell of was taken back."""
        self._keep(lambda item: item.kind != "commits")

    def expelled(self) -> None:
        """What this member did as one that is given up is no longer its to tell."""
        self._keep(lambda item: item.kind == "leave")

    def clear(self) -> None:
        """Nobody is there to be told."""
        self._keep(lambda _item: False)

    def reconnected(self) -> None:
        """What is not acknowledged may not have come through."""
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


def _groups(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Records that can go into one frame: those that did before, or none of which was sent."""
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


# --- reporter ---
# A supervisor's side: it tells the coordinator which of its children have ended.


class Reporter:
    """Has no thread, and never waits for longer than `patience` seconds.

    What could not be told, because the coordinator is dead or just starting, is told when there is
    something else to tell or when `flush` is called.
    """

    def __init__(self, address: tuple[str, int], key: bytes, *, patience: float = 0.5) -> None:
        self._address, self._key, self._patience = address, key, patience
        self._untold: deque[dict[str, Any]] = deque()
        self._call: Call | None = None

    def gone(self, pid: int, status: int) -> bool:
        """A child has ended, with this exit code or minus the signal; says whether all is told."""
        self._untold.append({"kind": "gone", "pid": pid, "status": status})
        return self.flush()

    def drop(self, member: int, seconds: float) -> bool:
        """Cut a member off from the coordinator for a while, to see what follows."""
        self._untold.append({"kind": "drop", "member": member, "seconds": seconds})
        return self.flush()

    def flush(self) -> bool:
        """Tell what is left to tell; says whether that is all."""
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
    """A coordinator that was killed is known by the end of what it says."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
