"""The handshake: both ends prove that they know the run's key, and neither sends it.

    listener ──▶ challenge  version, nonce
    caller   ──▶ proof      version, nonce, card, HMAC(key, caller's label + all said so far)
    listener ──▶ answer     card, HMAC(key, listener's label + all said so far)   or a refusal

The nonces are fresh, so recorded messages are of no use. The labels differ, so no proof can be sent
back as one's own. The proofs cover all messages so far, so none of them can be changed. The keys of
the session, one per direction, are derived from the run's key and both nonces.

This module makes and reads the messages; `echelon.comm.channel.endpoint` sends and receives them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import struct
from typing import Any, NamedTuple

from echelon.comm.channel.frames import VERSION
from echelon.core.errors import PeerError

NONCE = 32
PROOF = 32
CARD_LIMIT = 512
_MAGIC = b"ECHh"
_CALLER = b"echelon channel caller 1"
_LISTENER = b"echelon channel listener 1"
_SEAL = 1  # flag: this end wants encryption
_YES, _NO = 1, 0

_CHALLENGE = struct.Struct(f"<4sHH{NONCE}s")
_CALL = struct.Struct(f"<4sHH{NONCE}sH")
_ANSWER = struct.Struct("<4sHH")
CHALLENGE, CALL, ANSWER = _CHALLENGE.size, _CALL.size, _ANSWER.size


class Refused(PeerError):
    """The handshake failed: `str` says why."""


class Card(NamedTuple):
    """How one end of a connection introduces itself."""

    role: str
    pid: int
    host: str

    def pack(self) -> bytes:
        text = json.dumps([self.role, self.pid, self.host]).encode()
        if len(text) > CARD_LIMIT:
            raise ValueError(f"role and host have {len(text)} bytes together: {CARD_LIMIT} at most")
        return text

    @classmethod
    def read(cls, data: bytes) -> Card:
        try:
            found: Any = json.loads(data)
        except (ValueError, RecursionError):
            raise Refused("its card is not JSON") from None
        kinds = [type(value) for value in found] if isinstance(found, list) else []
        if kinds != [str, int, str] or not found[0].isprintable():
            raise Refused("its card is not a role, a process id and a host")
        return cls(*found)


class Keys(NamedTuple):
    """The keys of one connection, as one end uses them."""

    send: bytes
    receive: bytes
    send_start: int
    receive_start: int
    """Start value of the first received frame's check; `send_start` is that of the first sent."""


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def challenge(nonce: bytes, seal: bool) -> bytes:
    """Return the listener's first message."""
    return _CHALLENGE.pack(_MAGIC, VERSION, _SEAL if seal else 0, nonce)


def read_challenge(data: bytes) -> tuple[bytes, bool]:
    """Return the listener's nonce, and whether it wants encryption."""
    magic, version, flags, nonce = _CHALLENGE.unpack(data)
    _look(magic, version, flags)
    return nonce, bool(flags)


def call(key: bytes, nonce: bytes, seal: bool, card: Card, heard: bytes) -> bytes:
    """Return the caller's proof; `heard` is the challenge."""
    text = card.pack()
    said = _CALL.pack(_MAGIC, VERSION, _SEAL if seal else 0, nonce, len(text)) + text
    return said + _proof(key, _CALLER, heard, said)


def call_length(data: bytes) -> int:
    """Return the length of the caller's proof, given its first `CALL` bytes.

    Refuse callers that do not speak this protocol.
    """
    magic, version, flags, _, card = _CALL.unpack(data)
    _look(magic, version, flags)
    if card > CARD_LIMIT:
        raise Refused(f"a card of {card} bytes is over the limit of {CARD_LIMIT}")
    return CALL + int(card) + PROOF


def read_call(key: bytes, data: bytes, said: bytes) -> tuple[bytes, bool, Card]:
    """Check the caller's proof; return its nonce, whether it wants encryption, and its card.

    `said` is the listener's challenge.
    """
    _, _, flags, nonce, _ = _CALL.unpack_from(data)
    body, proof = data[:-PROOF], data[-PROOF:]
    if not hmac.compare_digest(proof, _proof(key, _CALLER, said, body)):
        raise Refused("wrong key: this is another run's")
    return nonce, bool(flags), Card.read(body[CALL:])


def answer(key: bytes, card: Card, heard: bytes) -> bytes:
    """Return the listener's answer; `heard` is the challenge and the caller's proof."""
    text = card.pack()
    said = _ANSWER.pack(_MAGIC, _YES, len(text)) + text
    return said + _proof(key, _LISTENER, heard, said)


def refusal(why: str) -> bytes:
    """Return the listener's answer to a caller that it turns away."""
    text = why.encode()[:CARD_LIMIT]
    return _ANSWER.pack(_MAGIC, _NO, len(text)) + text + bytes(PROOF)


def answer_length(data: bytes) -> int:
    """Return the length of the listener's answer, given its first `ANSWER` bytes."""
    magic, verdict, size = _ANSWER.unpack(data)
    if magic != _MAGIC or verdict not in (_YES, _NO) or size > CARD_LIMIT:
        raise Refused("no Echelon is listening there")
    return ANSWER + int(size) + PROOF


def read_answer(key: bytes, data: bytes, said: bytes) -> Card:
    """Check the listener's answer and return its card; `said` is the challenge and the proof."""
    _, verdict, _ = _ANSWER.unpack_from(data)
    body, proof = data[:-PROOF], data[-PROOF:]
    if verdict == _NO:
        text = body[ANSWER:].decode(errors="replace")
        raise Refused("it says: " + "".join(c for c in text if c.isprintable()))
    if not hmac.compare_digest(proof, _proof(key, _LISTENER, said, body)):
        raise Refused("wrong key: another run is listening there")
    return Card.read(body[ANSWER:])


def keys(key: bytes, listener: bytes, caller: bytes, *, calling: bool) -> Keys:
    """Derive the session's keys: HKDF (RFC 5869) of the run's key, salted with both nonces."""
    root = hmac.digest(listener + caller, key, "sha256")
    there, there_start = _derived(root, b"to the listener")
    back, back_start = _derived(root, b"to the caller")
    if calling:
        return Keys(there, back, there_start, back_start)
    return Keys(back, there, back_start, there_start)


def _derived(root: bytes, label: bytes) -> tuple[bytes, int]:
    first = hmac.digest(root, b"echelon channel 1 " + label + b"\x01", "sha256")
    second = hmac.digest(root, first + b"echelon channel 1 " + label + b"\x02", "sha256")
    return first, int.from_bytes(second[:4], "little")


def _proof(key: bytes, label: bytes, *said: bytes) -> bytes:
    return hmac.new(key, label + b"".join(said), hashlib.sha256).digest()


def _look(magic: bytes, version: int, flags: int) -> None:
    if magic != _MAGIC:
        raise Refused("what it says is not Echelon's handshake")
    if version != VERSION:
        raise Refused(
            f"protocol version {version} and {VERSION} do not fit: "
            "the same version of Echelon is needed everywhere"
        )
    if flags not in (0, _SEAL):
        raise Refused(f"flags {flags:#x} are not known")
