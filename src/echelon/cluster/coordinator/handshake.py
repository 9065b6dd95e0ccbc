"""Both sides prove that they know the run's key, and neither sends it.

    coordinator ──▶ challenge {version, nonce}
    member      ──▶ proof {version, nonce, proof}      HMAC(key, member's label + both nonces)
    coordinator ──▶ proof {proof}                      HMAC(key, its own label + both nonces)

The nonces are fresh, so nothing heard before is of use; the labels differ, so an answer cannot be
sent back as one's own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from echelon.cluster.coordinator.frames import BadFrame, Message

VERSION = 1
"""Of everything that is said between members and coordinator."""
NONCE = 32
_MEMBER = b"echelon member 1"
_COORDINATOR = b"echelon coordinator 1"


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def member_proof(key: bytes, ours: bytes, theirs: bytes) -> str:
    """`ours` is the coordinator's nonce and `theirs` the member's, whoever computes it."""
    return hmac.new(key, _MEMBER + ours + theirs, hashlib.sha256).hexdigest()


def coordinator_proof(key: bytes, ours: bytes, theirs: bytes) -> str:
    return hmac.new(key, _COORDINATOR + ours + theirs, hashlib.sha256).hexdigest()


def is_proof(given: object, right: str) -> bool:
    """Compared in a time that says nothing of where they differ."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), right.encode())


def challenge_fields(nonce: bytes) -> Message:
    return {"version": VERSION, "nonce": nonce.hex()}


def answered(key: bytes, nonce: bytes, message: Message) -> str:
    """The coordinator's proof in return for a member's right one."""
    theirs = _nonce_of(message, "proof")
    if not is_proof(message.get("proof"), member_proof(key, nonce, theirs)):
        raise BadFrame("wrong key: this is another run's join string")
    return coordinator_proof(key, nonce, theirs)


def answer_to(key: bytes, nonce: bytes, challenge: Message) -> tuple[Message, str]:
    """A member's answer, and the proof it awaits in return."""
    theirs = _nonce_of(challenge, "challenge")
    proof = member_proof(key, theirs, nonce)
    fields: Message = {**challenge_fields(nonce), "proof": proof}
    return fields, coordinator_proof(key, theirs, nonce)


def _nonce_of(message: Message, kind: str) -> bytes:
    if message["kind"] != kind:
        raise BadFrame(f"{message['kind']!r} where {kind!r} was due")
    if message.get("version") != VERSION:
        raise BadFrame(
            f"protocol version {message.get('version')!r} and {VERSION} do not fit: "
            "the same version of Echelon is needed everywhere"
        )
    text = message.get("nonce")
    try:
        nonce = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        nonce = b""
    if len(nonce) != NONCE:
        raise BadFrame(f"a nonce has {NONCE} bytes in hexadecimal digits")
    return nonce
