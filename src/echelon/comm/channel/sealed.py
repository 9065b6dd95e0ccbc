"""The two ways in which frames are on the wire: as they are, and encrypted.

A sealed frame is its header, which is proved though not hidden, a record with the head (and the
body, if that is small), and a record for each part of a larger body. Every record is followed by
its tag, and can be opened by nobody else, nowhere else and only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from echelon.comm.channel.buffers import CHUNK, NOTHING, chunks
from echelon.comm.channel.cipher import TAG, Cipher
from echelon.comm.channel.frames import HEAD_LIMIT, Header, pack, read_head
from echelon.comm.channel.plain import Inbox, Outbox, Progress, Rights, steps

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
