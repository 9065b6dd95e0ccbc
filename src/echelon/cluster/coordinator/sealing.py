"""Frames between hosts: encrypted, in order and unchanged, once both sides have shown the key."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.cluster.coordinator.frames import HEAD, Tampered, head
from echelon.comm.channel.handshake import keys
from echelon.comm.channel.stream import TAG, Cipher
from echelon.core.errors import PeerError


class Seal:
    """Both directions of one connection, as one side sees it."""

    def __init__(self, key: bytes, coordinator: bytes, member: bytes, *, calling: bool) -> None:
        """`coordinator` and `member` are the nonces of the two."""
        found = keys(key, coordinator, member, calling=calling)
        self._out, self._in = Cipher(found.send), Cipher(found.receive)

    def closed(self, parts: Sequence[bytes]) -> bytes:
        """A frame, given in parts, as it goes over the wire."""
        body = memoryview(b"".join(parts))[HEAD:]
        sealed = bytearray(head(len(body) + TAG, more=TAG)) + bytes(len(body) + TAG)
        self._out.seal(body, memoryview(sealed)[HEAD:])
        return bytes(sealed)

    def opened(self, body: bytes) -> bytes:
        if len(body) < TAG:
            raise Tampered("a frame is too short to be an encrypted one")
        text = bytearray(len(body) - TAG)
        try:
            self._in.open(memoryview(body), memoryview(text))
        except PeerError as error:
            raise Tampered(str(error)) from None
        return bytes(text)
