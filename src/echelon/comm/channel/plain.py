"""Bytes in and out of a socket: what every connection does."""

from __future__ import annotations

import array
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from echelon.comm.channel.buffers import CHUNK, NOTHING, after
from echelon.comm.channel.sockets import STALL, TICK
from echelon.core.errors import PeerError

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
