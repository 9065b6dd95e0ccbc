"""Both sides prove that they know the run's key, and neither sends it.

    coordinator ──▶ challenge {version, nonce, sealed}
    member      ──▶ proof {version, nonce, sealed, proof}    HMAC(key, member's label + all of this)
    coordinator ──▶ proof {proof}                            HMAC(key, its own label + the same)

The nonces are fresh, so nothing heard before is of use; the labels differ, so an answer cannot be
sent back as one's own. What follows is encrypted (`sealed`) if either side sees that it leaves its
host; the member says it last and under its proof, so nobody in between can talk them out of it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from echelon.cluster.coordinator.frames import BadFrame, Message
from echelon.cluster.coordinator.sealing import Seal

VERSION = 2
"""Of everything that is said between members and coordinator."""
NONCE = 32
_MEMBER = b"echelon member 2"
_COORDINATOR = b"echelon coordinator 2"


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def member_proof(key: bytes, ours: bytes, theirs: bytes, sealed: bool) -> str:
    """`ours` is the coordinator's nonce and `theirs` the member's, whoever computes it."""
    return _proof(key, _MEMBER, ours, theirs, sealed)


def coordinator_proof(key: bytes, ours: bytes, theirs: bytes, sealed: bool) -> str:
    return _proof(key, _COORDINATOR, ours, theirs, sealed)


def _proof(key: bytes, label: bytes, ours: bytes, theirs: bytes, sealed: bool) -> str:
    return hmac.new(key, label + ours + theirs + bytes([sealed]), hashlib.sha256).hexdigest()


def is_proof(given: object, right: str) -> bool:
    """Compared in a time that says nothing of where they differ."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), right.encode())


def challenge_fields(nonce: bytes, sealed: bool) -> Message:
    return {"version": VERSION, "nonce": nonce.hex(), "sealed": sealed}


def answered(key: bytes, nonce: bytes, sealed: bool, message: Message) -> tuple[str, Seal | None]:
    """The coordinator's proof in return for a member's right one, and what follows it."""
    theirs, wanted = _nonce_of(message, "proof"), message.get("sealed") is True
    if not is_proof(message.get("proof"), member_proof(key, nonce, theirs, wanted)):
        raise BadFrame("wrong key: this is another run's join string")
    if sealed and not wanted:
        raise BadFrame("between hosts everything is encrypted")
    seal = Seal(key, nonce, theirs, calling=False) if wanted else None
    return coordinator_proof(key, nonce, theirs, wanted), seal


def answer_to(
    key: bytes, nonce: bytes, sealed: bool, challenge: Message
) -> tuple[Message, str, Seal | None]:
    """A member's answer, the proof it awaits in return, and what follows it."""
    theirs = _nonce_of(challenge, "challenge")
    sealed = sealed or challenge.get("sealed") is True
    proof = member_proof(key, theirs, nonce, sealed)
    fields: Message = {**challenge_fields(nonce, sealed), "proof": proof}
    seal = Seal(key, theirs, nonce, calling=True) if sealed else None
    return fields, coordinator_proof(key, theirs, nonce, sealed), seal


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
