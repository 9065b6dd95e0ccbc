"""One connection as the coordinator holds it: bounded buffers, and never a wait."""

from __future__ import annotations

import socket
from collections import deque
from enum import Enum
from itertools import islice

from echelon.cluster.coordinator.frames import LIMIT, SHORT, Decoder, encode
from echelon.cluster.coordinator.handshake import challenge_fields, fresh_nonce
from echelon.cluster.coordinator.roster import Member
from echelon.cluster.coordinator.sealing import Seal
from echelon.comm.channel.stream import TAG, is_here

CHUNK = 1 << 16
UNSENT = 8 * LIMIT
"""Bytes that a member may leave unread before it is dropped."""
_PARTS = 64


class Stage(Enum):
    """How far a connection has come."""

    CHALLENGED = "challenged"
    PROVEN = "proven"
    MEMBER = "member"
    SUPERVISOR = "supervisor"
    LEAVING = "leaving"
    """What is left is sent; what still comes is thrown away."""


class Line:
    """Sends when it can; says when it has to be asked again."""

    def __init__(self, connection: socket.socket, address: str, now: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.address, self.since = connection, address, now
        """`since`: when its stage began."""
        self.stage = Stage.CHALLENGED
        self.member: Member | None = None
        self.watches_writing = False
        self.nonce = fresh_nonce()
        self.sealed = not is_here(address)
        """Whether what is said leaves this host."""
        self._seal: Seal | None = None
        self.decoder = Decoder(SHORT)
        self._unsent: deque[memoryview] = deque()
        self._waiting = 0
        self.put(encode("challenge", **challenge_fields(self.nonce, self.sealed)))

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def is_clogged(self) -> bool:
        return self._waiting > UNSENT

    def proven(self, seal: Seal | None) -> None:
        """From here on, with this encryption."""
        self.stage, self.decoder.limit = Stage.PROVEN, LIMIT
        if seal is not None:
            self._seal, self.decoder.opened = seal, seal.opened
            self.decoder.limit += TAG

    def put(self, *parts: bytes) -> None:
        """One frame."""
        for part in parts if self._seal is None else [self._seal.closed(parts)]:
            self._unsent.append(memoryview(part))
            self._waiting += len(part)

    def receive(self) -> bytes | None:
        """What has come: nothing at the end, None if there is no more for now."""
        try:
            return self.socket.recv(CHUNK)
        except (BlockingIOError, InterruptedError):
            return None

    def flush(self) -> None:
        """Send what the kernel takes."""
        while self._unsent:
            try:
                if len(self._unsent) == 1:
                    sent = self.socket.send(self._unsent[0])
                else:
                    sent = self.socket.sendmsg(list(islice(self._unsent, _PARTS)))
            except (BlockingIOError, InterruptedError):
                return
            self._waiting -= sent
            self._forget(sent)

    def _forget(self, sent: int) -> None:
        while sent:
            part = self._unsent.popleft()
            if sent < len(part):
                self._unsent.appendleft(part[sent:])
                return
            sent -= len(part)

    def leave(self, now: float) -> None:
        self.stage, self.since, self.member = Stage.LEAVING, now, None

    def say_goodbye(self) -> None:
        """The other side reads to the end; closing at once might take back what is under way."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:  # the other side was quicker
            return

    def close(self) -> None:
        self.socket.close()
