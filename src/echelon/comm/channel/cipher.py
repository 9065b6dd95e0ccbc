"""AES-256-GCM, a key and a counter for each direction of each connection."""

from __future__ import annotations

import struct

from echelon.core.errors import PeerError

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
