"""A connection to the coordinator, from the other side."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

from echelon.cluster.coordinator.frames import LIMIT, BadFrame, Decoder, Message, encode
from echelon.cluster.coordinator.handshake import answer_to, fresh_nonce, is_proof
from echelon.cluster.coordinator.sealing import Seal
from echelon.comm.channel.stream import TAG, close_in_children, stays_here
from echelon.core.errors import PeerError

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
