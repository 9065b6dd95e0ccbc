"""Frames as bytes on a socket, plain or encrypted.

    PlainSender, SealedSender        frames  →  bytes       (with a Cipher: AES-256-GCM)
        Outbox                                  bytes  →  socket
        Inbox                                   bytes  ←  socket
    PlainReceiver, SealedReceiver    frames  ←  bytes

Plain bodies are sent from and received into the user's memory without a copy, except for the few
bytes that were read ahead.

A sealed frame is its header, which is authenticated though not hidden, one record with the head
(and the body, if that is small), and one record for each part of a larger body. Each record is
followed by its tag. Only the peer can open it, only once, and only in its place.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

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
from echelon.comm.channel.sockets import STALL, TICK
from echelon.core.errors import PeerError

Progress = Callable[[int], None]
"""Called with the number of bytes of a body that are there."""
Rights = Sequence[tuple[int, int, bytes]]
"""Ancillary data of `sendmsg`: descriptors."""

CAPACITY = 256 * 1024
"""Bytes that an inbox holds: more than the largest head with a small body."""
AHEAD = 16 * 1024
"""Bytes read at once: a few small frames, but little of a large body, because those are copied."""
SMALL = 64 * 1024
"""Bytes of the largest body that goes into one record with its head."""
RECORD = 256 * 1024
"""Bytes of a larger body that are encrypted at a time: so few that they are still in a core's cache
when the kernel copies them, and that the other end can open some while more are sealed."""
TAG = 16
LOWEST_32 = 0xFFFFFFFF
"""The start value of a frame's check counts up by one per frame, in 32 bits."""
_FIRST = HEAD_LIMIT + SMALL
_NONCE = struct.Struct("<4xQ")
_PIECES = 512  # buffers for one sendmsg; the kernel takes at most 1024
_DESCRIPTORS = 4
_INT = array.array("i").itemsize
_ROOM = socket.CMSG_SPACE(_DESCRIPTORS * _INT)


class Sender(Protocol):
    """Turns frames into bytes."""

    def send(
        self, kind: int, seq: int, head: bytes, body: list[memoryview], rights: Rights = ()
    ) -> None: ...

    def ping(self, kind: int) -> None:
        """Send an empty frame; NoRoom if the socket takes nothing now."""


class Receiver(Protocol):
    """Turns bytes into the head and the body of a frame; `Connection` reads the header."""

    def head(self, header: Header, start: bytes) -> bytes:
        """Read the head of a frame; `start` is the header as bytes."""
        ...

    def body(self, views: Sequence[memoryview], progress: Progress | None) -> None:
        """Read the body into memory of its size; `progress` is called as bytes come in."""
        ...

    def skip(self, size: int) -> None:
        """Read a body of `size` bytes and drop it."""
        ...


class PlainSender:
    def __init__(self, outbox: Outbox, start: int) -> None:
        self._outbox, self._next = outbox, start

    def send(
        self, kind: int, seq: int, head: bytes, body: list[memoryview], rights: Rights = ()
    ) -> None:
        size = sum(map(len, body))
        first = pack(kind, seq, head, size, self._next) + head
        self._next = self._next + 1 & LOWEST_32
        self._outbox.put([memoryview(first), *body], len(first) + size, rights)

    def ping(self, kind: int) -> None:
        self._outbox.put_if_room(pack(kind, 0, b"", 0, self._next))
        self._next = self._next + 1 & LOWEST_32


class PlainReceiver:
    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._waste = NOTHING

    def head(self, header: Header, start: bytes) -> bytes:
        del start
        self._inbox.must(header.head)
        return read_head(header, self._inbox.take(header.head))

    def body(self, views: Sequence[memoryview], progress: Progress | None) -> None:
        if progress is not None:
            steps(views, self._inbox.fill, progress)
            return
        for whole in views:
            self._inbox.fill(whole)

    def skip(self, size: int) -> None:
        self._waste = _at_least(self._waste, CHUNK)
        for at in range(0, size, CHUNK):
            self._inbox.fill(self._waste[: min(CHUNK, size - at)])


def steps(
    views: Sequence[memoryview], fill: Callable[[memoryview], None], progress: Progress
) -> None:
    """Fill the memory a chunk at a time, and report after each chunk how many bytes are there."""
    done = 0
    for whole in views:
        for at in range(0, len(whole), CHUNK):
            piece = whole[at : at + CHUNK]
            fill(piece)
            done += len(piece)
            progress(done)


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
        self._next = self._next + 1 & LOWEST_32
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

    def body(self, views: Sequence[memoryview], progress: Progress | None) -> None:
        if sum(map(len, views)) <= SMALL:
            _spread(self._small, views)
            return
        done = 0
        for pieces in chunks(views, RECORD):
            size = sum(map(len, pieces))
            self._chunk(pieces, size)
            done += size
            if progress is not None:
                progress(done)

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
    """Return the buffer if it is large enough, or a new one: only large bodies need large ones."""
    return buffer if len(buffer) >= size else memoryview(bytearray(size))


def _spread(text: memoryview, views: Sequence[memoryview]) -> None:
    at = 0
    for whole in views:
        whole[:] = text[at : at + len(whole)]
        at += len(whole)


class Cipher:
    """AES-256-GCM for one direction of one connection.

    No nonce is used twice: every key serves one connection only, and the nonce counts up.
    """

    def __init__(self, key: bytes) -> None:
        # Imported here so that connections within one host do not pay for it.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)
        self._count = 0

    def seal(self, data: memoryview, into: memoryview, beside: bytes = b"") -> None:
        """Encrypt `data` to `into`, which is `TAG` bytes longer, and authenticate `beside` too."""
        self._cipher.encrypt_into(self._nonce(), data, beside, into)

    def open(self, data: memoryview, into: memoryview, beside: bytes = b"") -> None:
        # Costs nothing: the module was imported with the cipher.
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(self._nonce(), data, beside, into)
        except InvalidTag:
            raise PeerError("what came was changed on its way") from None

    def _nonce(self) -> bytes:
        self._count += 1
        return _NONCE.pack(self._count)


# Bytes in and out of a socket


class Outbox:
    """The sending side of a socket."""

    def __init__(self, connected: socket.socket, fate: Fate) -> None:
        self._socket, self._fate = connected, fate
        self._rest = NOTHING  # of a short message that was cut off by `put_if_room`

    def put(self, buffers: list[memoryview], size: int, rights: Rights = ()) -> None:
        """Send all buffers, `size` bytes together: in one call, if the kernel takes them all."""
        if self._rest:
            buffers, size = [self._rest, *buffers], size + len(self._rest)
            self._rest = NOTHING
        sent = self._some(buffers, rights)
        if sent < size:
            self._others(after(buffers, sent))

    def put_if_room(self, data: bytes) -> None:
        """Send a short message if the socket takes it now; NoRoom if not.

        If the socket takes only a part, the rest goes with the next `put`. While such a rest is
        here, this does nothing.
        """
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
    """The receiving side of a socket, which reads ahead: several small messages in one call."""

    def __init__(self, connected: socket.socket, fate: Fate) -> None:
        self._socket, self._fate = connected, fate
        self._buffer = memoryview(bytearray(CAPACITY))
        self._start = self._stop = 0
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._unix = connected.family == socket.AF_UNIX
        self.descriptors: deque[int] = deque()
        """Descriptors that came with frames of kind `SEGMENT`."""

    @property
    def held(self) -> int:
        return self._stop - self._start

    def need(self, count: int, until: float | None) -> bool:
        """Wait for that many bytes, `until` at the latest; return whether they are here."""
        while self._stop - self._start < count:
            if not self._more(count, until):
                return False
        return True

    def must(self, count: int) -> None:
        """Wait for that many bytes in the middle of a frame; PeerError if they stop coming."""
        while self.held < count:
            if not self._more(count, monotonic() + STALL):
                raise PeerError(f"stopped in the middle of a message for {STALL:g} s")

    def take(self, count: int) -> memoryview:
        """Return the next bytes, which have to be here; valid until the next call."""
        start = self._start
        self._start = stop = start + count
        if stop == self._stop:
            self._start = self._stop = 0
        return self._buffer[start:stop]

    def fill(self, room: memoryview) -> None:
        """Read straight into this memory; only bytes that were read ahead are copied."""
        at = min(self.held, len(room))
        room[:at] = self.take(at)
        while at < len(room):
            count = self._some(room[at:], monotonic() + STALL, self._socket.recv_into)
            if not count:
                raise PeerError(f"stopped in the middle of a message for {STALL:g} s")
            at += count

    def admit(self, start: bytes, size: int) -> int:
        """Read complete messages that begin with `start`, of `size` bytes each, and nothing else.

        Return how many there were before any other message.
        """
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
        """Return how many bytes were read; 0 if none came before `until`."""
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


class Fate:
    """Why a connection is over, once it is over.

    All parts of a connection share it, so that none needs a reference to another part.
    """

    def __init__(self) -> None:
        self.why: str | None = None

    def check(self) -> None:
        if self.why is not None:
            raise PeerError(self.why)
