"""Sockets; bytes in and out, plain or AES-GCM."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol
from weakref import WeakSet

from echelon.comm.channel.frames import (
    CHUNK,
    HEAD_LIMIT,
    NOTHING,
    Header,
    after,
    chunks,
    pack,
    read_head,
)
from echelon.comm.peers import is_loopback
from echelon.core.errors import PeerError

# --- plain ---
# Bytes in and out of a socket: what every connection does.

CAPACITY = 256 * 1024
"""Bytes that are held: more than the largest head with a small body."""
AHEAD = 16 * 1024
"""Bytes read at once: a few small frames, and little of a large body, which is copied then."""
_PIECES = 512  # the kernel takes 1024 at a time
_DESCRIPTORS = 4
_INT = array.array("i").itemsize
_ROOM = socket.CMSG_SPACE(_DESCRIPTORS * _INT)

Progress = Callable[[int], None]
Rights = Sequence[tuple[int, int, bytes]]


class Fate:
    """Why a connection is over, once it is. All its parts look at it; none holds another one."""

    def __init__(self) -> None:
        self.why: str | None = None

    def check(self) -> None:
        if self.why is not None:
            raise PeerError(self.why)


class Outbox:
    """Puts bytes into a socket, all of them or an error."""

    def __init__(self, connected: socket.socket, fate: Fate) -> None:
        self._socket, self._fate = connected, fate
        self._rest = NOTHING

    def put(self, buffers: list[memoryview], size: int, rights: Rights = ()) -> None:
        """`size` is that of all together. One call to the kernel, if it takes them."""
        if self._rest:
            buffers, size = [self._rest, *buffers], size + len(self._rest)
            self._rest = NOTHING
        sent = self._some(buffers, rights)
        if sent < size:
            self._others(after(buffers, sent))

    def put_if_room(self, data: bytes) -> None:
        """A short message at once, or not at all; none may be cut off in its middle."""
        if self._rest:
            return
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise NoRoom from None
        self._rest = memoryview(data)[sent:]

    def _others(self, left: list[memoryview]) -> None:
        since = monotonic()
        while left:
            if sent := self._some(left):
                left, since = after(left, sent), monotonic()
            elif monotonic() - since > STALL:
                raise PeerError(f"took nothing of what was sent for {STALL:g} s")

    def _some(self, buffers: list[memoryview], rights: Rights = ()) -> int:
        try:
            return self._socket.sendmsg(buffers[:_PIECES], rights)
        except BlockingIOError:
            self._fate.check()
            return 0


class NoRoom(Exception):
    """The socket takes nothing at the moment."""


class Inbox:
    """Takes bytes out of a socket, with few calls: small messages come in one."""

    def __init__(self, connected: socket.socket, fate: Fate) -> None:
        self._socket, self._fate = connected, fate
        self._buffer = memoryview(bytearray(CAPACITY))
        self._start = self._stop = 0
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._unix = connected.family == socket.AF_UNIX
        self.descriptors: deque[int] = deque()
        """That came along, for `SEGMENT`."""

    @property
    def held(self) -> int:
        return self._stop - self._start

    def need(self, count: int, until: float | None) -> bool:
        """Whether that many bytes are here, at `until` at the latest."""
        while self._stop - self._start < count:
            if not self._more(count, until):
                return False
        return True

    def must(self, count: int) -> None:
        """That many bytes, which have to come."""
        while self.held < count:
            if not self._more(count, monotonic() + STALL):
                raise PeerError(f"stopped in the middle of a message for {STALL:g} s")

    def take(self, count: int) -> memoryview:
        """The next bytes, which are here; good until the next call."""
        start = self._start
        self._start = stop = start + count
        if stop == self._stop:
            self._start = self._stop = 0
        return self._buffer[start:stop]

    def peek(self, count: int) -> memoryview:
        return self._buffer[self._start : self._start + count]

    def fill(self, room: memoryview) -> None:
        """Straight into somebody's memory, but for what was read ahead."""
        at = min(self.held, len(room))
        room[:at] = self.take(at)
        while at < len(room):
            count = self._some(room[at:], monotonic() + STALL, self._socket.recv_into)
            if not count:
                raise PeerError(f"stopped in the middle of a message for {STALL:g} s")
            at += count

    def admit(self, start: bytes, size: int) -> int:
        """How many messages of this size that start so are there, whole, before any other; they
        are read, and nothing else."""
        try:
            seen = self._socket.recv(AHEAD, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        if not seen:
            raise EOFError
        count = 0
        while seen.startswith(start, count * size) and len(seen) >= (count + 1) * size:
            count += 1
        if count:
            self._start = 0
            self._stop = self._socket.recv_into(self._buffer[: count * size])
        return count

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _more(self, count: int, until: float | None) -> bool:
        if self._start + count > CAPACITY:
            held = self.held
            self._buffer[:held] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, held
        read = self._with_rights if self._unix else self._socket.recv_into
        room = max(AHEAD, count - self.held)
        got = self._some(self._buffer[self._stop : self._stop + room], until, read)
        self._stop += got
        return got > 0

    def _some(
        self,
        room: memoryview,
        until: float | None,
        read: Callable[[memoryview, int, int], int],
    ) -> int:
        """How many bytes came; 0: none until then."""
        while True:
            flags = 0
            if until is not None and (left := until - monotonic()) < TICK:
                if not self._poll.poll(max(0.0, left) * 1000):
                    self._fate.check()
                    return 0
                flags = socket.MSG_DONTWAIT
            try:
                count = read(room, 0, flags)
            except BlockingIOError:
                self._fate.check()
                continue
            if not count:
                raise EOFError
            return count

    def _with_rights(self, room: memoryview, _: int, flags: int) -> int:
        count, others, _, _ = self._socket.recvmsg_into(
            [room], _ROOM, flags | socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in others:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._keep(data)
        return count

    def _keep(self, data: bytes) -> None:
        numbers = array.array("i")
        numbers.frombytes(data[: len(data) - len(data) % _INT])
        self.descriptors.extend(numbers)
        if len(self.descriptors) > _DESCRIPTORS:
            self.close()
            raise PeerError("sent more descriptors than were asked for")


def steps(views: Sequence[memoryview], fill: Callable[[memoryview], None], told: Progress) -> None:
    """Fills the memory a chunk at a time, and says each time how far it is."""
    done = 0
    for whole in views:
        for at in range(0, len(whole), CHUNK):
            piece = whole[at : at + CHUNK]
            fill(piece)
            done += len(piece)
            told(done)


# --- sealed ---
# The two ways in which frames are on the wire: as they are, and encrypted.
#
# A sealed frame is its header, which is proved though not hidden, a record with the head (and the
# body, if that is small), and a record for each part of a larger body. Every record is followed by
# its tag, and can be opened by nobody else, nowhere else and only once.

SMALL = 64 * 1024
"""Bytes of a body that goes into one record with its head."""
RECORD = 256 * 1024
"""Bytes of a larger body that are encrypted at a time: so few that they are still in a core's cache
when the kernel copies them, and that the other end can open some while more are sealed."""
_FIRST = HEAD_LIMIT + SMALL
_LOWEST_32 = 0xFFFFFFFF


class Sender(Protocol):
    def send(
        self, kind: int, seq: int, head: bytes, body: list[memoryview], rights: Rights = ()
    ) -> None: ...
    def ping(self, kind: int) -> None:
        """A frame of nothing, if there is room for it."""


class Receiver(Protocol):
    def head(self, header: Header, start: bytes) -> bytes: ...
    def body(self, views: Sequence[memoryview], told: Progress | None) -> None: ...
    def skip(self, size: int) -> None: ...


class PlainSender:
    def __init__(self, outbox: Outbox, start: int) -> None:
        self._outbox, self._next = outbox, start

    def send(
        self, kind: int, seq: int, head: bytes, body: list[memoryview], rights: Rights = ()
    ) -> None:
        size = sum(map(len, body))
        first = pack(kind, seq, head, size, self._next) + head
        self._next = self._next + 1 & _LOWEST_32
        self._outbox.put([memoryview(first), *body], len(first) + size, rights)

    def ping(self, kind: int) -> None:
        self._outbox.put_if_room(pack(kind, 0, b"", 0, self._next))
        self._next = self._next + 1 & _LOWEST_32


class PlainReceiver:
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waste = NOTHING

    def head(self, header: Header, start: bytes) -> bytes:
        del start
        self._inbox.must(header.head)
        return read_head(header, self._inbox.take(header.head))

    def body(self, views: Sequence[memoryview], told: Progress | None) -> None:
        if told is not None:
            steps(views, self._inbox.fill, told)
            return
        for whole in views:
            self._inbox.fill(whole)

    def skip(self, size: int) -> None:
        self._waste = _at_least(self._waste, CHUNK)
        for at in range(0, size, CHUNK):
            self._inbox.fill(self._waste[: min(CHUNK, size - at)])


class SealedSender:
    def __init__(self, outbox: Outbox, start: int, cipher: Cipher) -> None:
        self._outbox, self._next, self._cipher = outbox, start, cipher
        self._sealed = memoryview(bytearray(_FIRST + TAG))
        self._joined = NOTHING

    def send(
        self, kind: int, seq: int, head: bytes, body: list[memoryview], rights: Rights = ()
    ) -> None:
        size = sum(map(len, body))
        small = size <= SMALL
        text = memoryview(b"".join([head, *body])) if small else memoryview(head)
        header = self._header(kind, seq, head, size)
        sealed = self._sealed[: len(text) + TAG]
        self._cipher.seal(text, sealed, header)
        self._outbox.put([memoryview(header), sealed], len(header) + len(sealed), rights)
        if not small:
            self._sealed = _at_least(self._sealed, RECORD + TAG)
            for pieces in chunks(body, RECORD):
                self._chunk(pieces)

    def ping(self, kind: int) -> None:
        header = self._header(kind, 0, b"", 0)
        tag = bytearray(TAG)
        self._cipher.seal(NOTHING, memoryview(tag), header)
        self._outbox.put_if_room(header + tag)

    def _header(self, kind: int, seq: int, head: bytes, size: int) -> bytes:
        header = pack(kind, seq, head, size, self._next, sealed=True)
        self._next = self._next + 1 & _LOWEST_32
        return header

    def _chunk(self, pieces: list[memoryview]) -> None:
        text = pieces[0] if len(pieces) == 1 else self._join(pieces)
        sealed = self._sealed[: len(text) + TAG]
        self._cipher.seal(text, sealed)
        self._outbox.put([sealed], len(sealed))

    def _join(self, pieces: list[memoryview]) -> memoryview:
        self._joined = _at_least(self._joined, RECORD)
        at = 0
        for piece in pieces:
            self._joined[at : at + len(piece)] = piece
            at += len(piece)
        return self._joined[:at]


class SealedReceiver:
    def __init__(self, inbox: Inbox, cipher: Cipher) -> None:
        self._inbox, self._cipher = inbox, cipher
        self._sealed = NOTHING
        self._text = memoryview(bytearray(_FIRST))
        self._small = NOTHING

    def head(self, header: Header, start: bytes) -> bytes:
        length = header.head + (header.body if header.body <= SMALL else 0)
        self._inbox.must(length + TAG)
        text = self._text[:length]
        self._cipher.open(self._inbox.take(length + TAG), text, start)
        self._small = text[header.head :]
        return bytes(text[: header.head])

    def body(self, views: Sequence[memoryview], told: Progress | None) -> None:
        if sum(map(len, views)) <= SMALL:
            _spread(self._small, views)
            return
        done = 0
        for pieces in chunks(views, RECORD):
            size = sum(map(len, pieces))
            self._chunk(pieces, size)
            done += size
            if told is not None:
                told(done)

    def skip(self, size: int) -> None:
        if size > SMALL:
            self._text = _at_least(self._text, RECORD)
            for at in range(0, size, RECORD):
                length = min(RECORD, size - at)
                self._chunk([self._text[:length]], length)

    def _chunk(self, pieces: list[memoryview], size: int) -> None:
        self._sealed = _at_least(self._sealed, RECORD + TAG)
        sealed = self._sealed[: size + TAG]
        self._inbox.fill(sealed)
        if len(pieces) == 1:
            self._cipher.open(sealed, pieces[0])
            return
        self._text = _at_least(self._text, RECORD)
        self._cipher.open(sealed, self._text[:size])
        _spread(self._text[:size], pieces)


def _at_least(buffer: memoryview, size: int) -> memoryview:
    """This one, or a new one: only those who send much need much."""
    return buffer if len(buffer) >= size else memoryview(bytearray(size))


def _spread(text: memoryview, views: Sequence[memoryview]) -> None:
    at = 0
    for whole in views:
        whole[:] = text[at : at + len(whole)]
        at += len(whole)


# --- cipher ---
# AES-256-GCM, a key and a counter for each direction of each connection.

TAG = 16
_NONCE = struct.Struct("<4xQ")


class Cipher:
    """One direction. No nonce is used twice: each key lives for one connection and counts up."""

    def __init__(self, key: bytes) -> None:
        # Connections within one host do not pay for it.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._count = 0

    def seal(self, data: memoryview, into: memoryview, beside: bytes = b"") -> None:
        """`into` is `TAG` bytes longer than `data`; what is `beside` is proved as well."""
        self._cipher.encrypt_into(self._nonce(), data, beside, into)

    def open(self, data: memoryview, into: memoryview, beside: bytes = b"") -> None:
        # Imported before, with the cipher.
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(self._nonce(), data, beside, into)
        except InvalidTag:
            raise PeerError("what came was changed on its way") from None

    def _nonce(self) -> bytes:
        self._count += 1
        return _NONCE.pack(self._count)


# --- sockets ---
# Addresses, and how sockets are set.

Address = tuple[str, int] | str
"""Host and port, or the name of an abstract unix socket."""

TICK = 0.25
"""Seconds after which a call that waits looks whether it still should."""
STALL = 30.0
"""Seconds without a byte of progress in mid-frame, though the peer is alive."""
_SLOW = b"bbr"
_FAST = (b"cubic", b"reno")
_LONGEST_NAME = 107


def words(address: Address) -> str:
    return f"unix socket {address}" if isinstance(address, str) else f"{address[0]}:{address[1]}"


def open_socket(address: Address, timeout: float) -> socket.socket:
    """A connection; OSError if nobody takes it at any of the addresses that a name has."""
    if isinstance(address, str):
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return _connected(opened, abstract(address), timeout)
    error: OSError | None = None
    for family, _, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            congestion(opened)
            return _connected(opened, where, timeout)
        except OSError as this:
            error = this
    assert error is not None, "a name that is known has an address"
    raise error


def _connected(opened: socket.socket, where: object, timeout: float) -> socket.socket:
    try:
        opened.settimeout(timeout)
        opened.connect(where)  # type: ignore[arg-type]
    except BaseException:
        opened.close()
        raise
    return opened


def serve_socket(address: Address) -> socket.socket:
    try:
        return _serve(address)
    except OSError as error:
        raise PeerError(f"nothing can listen at {words(address)}: {error.strerror}") from None


def _serve(address: Address) -> socket.socket:
    if not isinstance(address, str):
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(address, family=family, backlog=128)
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        opened.bind(abstract(address))
        opened.listen(128)
    except BaseException:
        opened.close()
        raise
    return opened


def address_of(listening: socket.socket) -> Address:
    found = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return bytes(found)[1:].decode() if isinstance(found, bytes) else str(found)
    return str(found[0]), int(found[1])


def abstract(name: str) -> str:
    """In no folder: gone with the last socket that has it."""
    if not name or "\0" in name or len(name.encode()) > _LONGEST_NAME:
        raise ValueError(f"{name!r} is no name of a unix socket: 1 to {_LONGEST_NAME} bytes")
    return "\0" + name


def stays_here(connected: socket.socket) -> bool:
    """Whether what is sent never leaves this host."""
    if connected.family == socket.AF_UNIX:
        return True
    return is_here(connected.getpeername()[0])


def is_here(host: str) -> bool:
    """Whether an address never leaves this host; also that of an IPv4 peer on an IPv6 socket."""
    return is_loopback(host.removeprefix("::ffff:"))


def congestion(opened: socket.socket) -> None:
    """BBR paces what it sends: over loopback and in data centres that costs more than half."""
    now = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    for name in _FAST if now == _SLOW else ():
        with contextlib.suppress(OSError):  # the kernel does not have it
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def settle(connected: socket.socket) -> None:
    """Calls block, for a tick at most; small frames go at once."""
    connected.settimeout(None)
    tick = struct.pack("@ll", int(TICK), int(TICK % 1 * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    if connected.family == socket.AF_UNIX:
        return
    congestion(connected)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Not less: the kernel would count the time in which a busy peer takes nothing, too.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL * 1000))


# --- doorway ---
# Descriptors that belong to one process: whoever is forked later gives its copies back.
#
# A copy in a loader's worker would keep a dead member's connection open, and the others waiting.


class Owner(Protocol):
    def close(self) -> None: ...


_OWNERS: WeakSet[Owner] = WeakSet()
_HOOKED: list[bool] = []


def close_in_children(owner: Owner) -> None:
    if not _HOOKED:
        _HOOKED.append(True)
        os.register_at_fork(after_in_child=_forked)
    _OWNERS.add(owner)


def _forked() -> None:
    for owner in list(_OWNERS):
        owner.close()
    _OWNERS.clear()
