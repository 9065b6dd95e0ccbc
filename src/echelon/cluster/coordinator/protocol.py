"""The wire protocol between members, supervisors and the coordinator.

A frame is four bytes of length (big-endian) and one JSON object with a `kind`. A connection begins
with a handshake in which both sides prove that they know the run's key and neither sends it:

    coordinator ──▶ challenge {version, nonce, sealed}
    member      ──▶ proof {version, nonce, sealed, proof}   HMAC(key, member's label + all of this)
    coordinator ──▶ proof {proof}                           HMAC(key, its own label + the same)

The nonces are fresh, so recorded frames are of no use; the labels differ, so an answer cannot be
sent back as one's own. The frames that follow are encrypted (`sealed`) if either side sees that the
connection leaves its host. The member decides last and under its proof, so an attacker in between
cannot turn encryption off.

Frames from a trainer:
    hello        role, version, pid, host, name, number, member, generation
    beat         step, doing, pace (seconds per sample), cpu (seconds used so far)
    arrived      generation (which it leaves; 0: a newcomer), progress, why, suspect
    commits      generation, records [[epoch, start, stop, first, last], …]; with a sixth number,
                 the member that computed the range alone
    shares       generation, version, shares of each batch by member
    rolled_back  version, why
    ledger       version, ledger: what is consumed; all leases become void
    lease        epoch, wanted, unit (leases are multiples of it), used (finished ranges)
    leave        why, fatal (ends the run for all), over (training is over for all)
Frames from a supervisor:
    hello, gone (a child has ended), drop (cut a member off, to inject a fault)

Frames that have to arrive carry `seq`, counted by the sender. They are answered by an `ack` (a
`lease` by a `leased`) with the same number, and sent again over a new connection until they are.

`check` validates every field of a frame before the coordinator uses it. The join string names a
run's coordinator and key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

from echelon.comm.channel.handshake import keys
from echelon.comm.channel.stream import TAG, Cipher
from echelon.core.errors import PeerError, UserError

VERSION = 2
"""Version of everything that is said between members and coordinator."""
BEAT = 0.25
"""Seconds between two heartbeats."""
LIMIT = 1 << 20
"""Bytes of the largest frame; `SHORT` before the sender has proved that it knows the key."""
SHORT = 1 << 10
HEAD = 4
"""Bytes of a frame's length."""
# Limits of the values in frames
NAME = 255
TEXT = 2000
PROGRESS = 16
RECORDS = 4096
MEMBERS = 1 << 16
NONCE = 32
"""Bytes of a nonce."""
_LARGEST = 1 << 62
_MEMBER = b"echelon member 2"
_COORDINATOR = b"echelon coordinator 2"
Message = dict[str, Any]


class BadFrame(PeerError):
    """Received data that violates the protocol."""


class Tampered(BadFrame):
    """An encrypted frame that was changed on its way: not its sender's fault."""


# Frames.


def encode(kind: str, **fields: Any) -> bytes:
    body = _ENCODER.encode({"kind": kind, **fields}).encode()
    return head(len(body)) + body


def head(length: int, more: int = 0) -> bytes:
    """Return a frame's length as bytes. `more`: bytes that encryption adds to the limit."""
    if length > LIMIT + more:
        raise BadFrame(f"a frame of {length:,} bytes is over the limit of {LIMIT:,}")
    return length.to_bytes(HEAD, "big")


def common_part(fields: Message) -> bytes:
    """Encode the fields that many frames share, once; for `encode_with`."""
    assert fields, "an object that is a part of another has a field"
    return _ENCODER.encode(fields).encode()[1:]


def encode_with(common: bytes, kind: str, **fields: Any) -> tuple[bytes, bytes]:
    """Return a frame in two parts; the second is `common` itself, so it takes no more memory."""
    own = _ENCODER.encode({"kind": kind, **fields}).encode()[:-1] + b","
    return head(len(own) + len(common)) + own, common


class Decoder:
    """Turns received bytes into messages; holds at most one frame and the bytes just received."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.opened: Callable[[bytes], bytes] | None = None
        """Decrypts the bodies of the following frames, if set."""
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that `data` completes. Refuse a length over the limit at once."""
        held = self._held
        held += data
        at = 0
        try:
            while len(held) - at >= HEAD:
                length = int.from_bytes(held[at : at + HEAD], "big")
                if length > self.limit:
                    raise BadFrame(
                        f"a frame of {length:,} bytes is over the limit of {self.limit:,}"
                    )
                stop = at + HEAD + length
                if len(held) < stop:
                    break
                body = bytes(held[at + HEAD : stop])
                at = stop
                yield decode(body if self.opened is None else self.opened(body))
        finally:
            del held[:at]


def decode(body: bytes) -> Message:
    try:
        message = _DECODER.decode(body.decode())
    except (ValueError, RecursionError):  # what is not UTF-8 is a ValueError too
        raise BadFrame("a frame is not JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadFrame("a frame is not a JSON object with a kind")
    return message


def _no_number(text: str) -> NoReturn:
    raise BadFrame(f"a frame has the value {text}, which is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_no_number)


# What the fields of frames may be.


def check(message: Message) -> None:
    """Refuse a frame that does not fit its row in `_FIELDS`. A nullable field may be missing."""
    kind = message["kind"]
    fields = _FIELDS.get(kind)
    if fields is None:
        raise BadFrame(f"a frame of the unknown kind {one_line(kind, 40)!r}")
    for name, (right, rule) in fields.items():
        value = message.get(name)
        if not right(value):
            shown = one_line(repr(value), 60)
            raise BadFrame(f"a frame {kind!r} says {name} = {shown}: it must be {rule}")


def one_line(text: str, length: int = TEXT) -> str:
    """Return the text as frames require it: printable, in one line, not too long."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)[:length]


Check = Callable[[Any], bool]


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _positive(value: Any) -> bool:
    return type(value) is int and 0 < value < _LARGEST


def _signed(value: Any) -> bool:
    return type(value) is int and -_LARGEST < value < _LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _flag(value: Any) -> bool:
    return type(value) is bool


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= TEXT and value.isprintable()


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= NAME and value.isprintable()


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _many(check: Check, most: int) -> Check:
    return lambda value: type(value) is list and len(value) <= most and all(map(check, value))


def _record(value: Any) -> bool:
    if not (type(value) is list and len(value) in (5, 6) and all(map(_whole, value))):
        return False
    _, start, stop, first, last, *_ = value
    return bool(start < stop and 1 <= first <= last + 1)  # last + 1: consumed without an update


def _pair(value: Any) -> bool:
    """Return whether the value is a non-empty range [start, stop]."""
    whole = type(value) is list and len(value) == 2 and all(map(_whole, value))
    return whole and value[0] < value[1]


def _ledger(value: Any) -> bool:
    """Return whether the value has the form of `Ledger.state_dict`."""
    match value:
        case {"samples": samples, "whole": list(whole), "parts": list(parts)}:
            triples = _many(_many(_whole, 3), MEMBERS)
            return _positive(samples) and triples(whole) and all(map(_page, parts))
    return False


def _page(value: Any) -> bool:
    match value:
        case {"epoch": epoch, "done": list(done)}:
            return _whole(epoch) and all(map(_pair, done))
    return False


_WHOLE = (_whole, "a whole number of at least 0")
_POSITIVE = (_positive, "a whole number of at least 1")
_MAYBE_WHOLE = (_or_none(_whole), "a whole number of at least 0 or null")
_NUMBER = (_number, "a number of at least 0")
_MAYBE_NUMBER = (_or_none(_number), "a number of at least 0 or null")
_FLAG = (_flag, "true or false")
_TEXT = (_text, f"printable text of at most {TEXT} characters")
_NAME = (_name, f"printable text of at most {NAME} characters")
_SEQ = (_or_none(_positive), "a whole number of at least 1 or null")
_FIELDS: dict[str, dict[str, tuple[Check, str]]] = {
    "hello": {
        "role": (("trainer", "supervisor").__contains__, "'trainer' or 'supervisor'"),
        "version": _WHOLE,
        "pid": _POSITIVE,
        "host": _NAME,
        "name": _NAME,
        "number": _MAYBE_WHOLE,
        "member": _MAYBE_WHOLE,
        "generation": _WHOLE,
    },
    "beat": {
        "step": _MAYBE_WHOLE,
        "doing": _NAME,
        "pace": _MAYBE_NUMBER,
        "cpu": _MAYBE_NUMBER,
    },
    "arrived": {
        "generation": _WHOLE,
        "progress": (_many(_signed, PROGRESS), f"a list of at most {PROGRESS} whole numbers"),
        "why": _TEXT,
        "suspect": _MAYBE_WHOLE,
    },
    "commits": {
        "seq": _SEQ,
        "generation": _POSITIVE,
        "records": (
            _many(_record, RECORDS),
            f"a list of at most {RECORDS} records [epoch, start, stop, first, last(, member)]",
        ),
    },
    "shares": {
        "seq": _SEQ,
        "generation": _POSITIVE,
        "version": _WHOLE,
        "shares": (_many(_number, MEMBERS), "a list of numbers of at least 0"),
    },
    "rolled_back": {"seq": _SEQ, "version": _WHOLE, "why": _TEXT},
    "leave": {
        "seq": _SEQ,
        "why": _TEXT,
        "fatal": _FLAG,
        "over": (_or_none(_flag), "true, false or null"),
    },
    "ledger": {"seq": _SEQ, "version": _WHOLE, "ledger": (_ledger, "a ledger's state")},
    "lease": {
        "seq": _SEQ,
        "epoch": _WHOLE,
        "wanted": _POSITIVE,
        "unit": (_or_none(_positive), "a whole number of at least 1 or null"),
        "used": (_or_none(_many(_pair, RECORDS)), "a list of ranges [start, stop] or null"),
    },
    "gone": {"pid": _POSITIVE, "status": (_signed, "a whole number")},
    "drop": {"member": _WHOLE, "seconds": _NUMBER},
}
SUPERVISORS = {"gone", "drop"}
"""Frames that only a supervisor may send, and the only ones it sends after its hello."""


# The handshake.


def challenge_fields(nonce: bytes, sealed: bool) -> Message:
    return {"version": VERSION, "nonce": nonce.hex(), "sealed": sealed}


def answer_to(
    key: bytes, nonce: bytes, sealed: bool, challenge: Message
) -> tuple[Message, str, Seal | None]:
    """Return a member's answer, the proof to expect in return, and the encryption to use then."""
    theirs = _nonce_of(challenge, "challenge")
    sealed = sealed or challenge.get("sealed") is True
    proof = member_proof(key, theirs, nonce, sealed)
    fields: Message = {**challenge_fields(nonce, sealed), "proof": proof}
    seal = Seal(key, theirs, nonce, calling=True) if sealed else None
    return fields, coordinator_proof(key, theirs, nonce, sealed), seal


def answered(key: bytes, nonce: bytes, sealed: bool, message: Message) -> tuple[str, Seal | None]:
    """Check a member's proof; return the coordinator's, and the encryption to use after it."""
    theirs, wanted = _nonce_of(message, "proof"), message.get("sealed") is True
    if not is_proof(message.get("proof"), member_proof(key, nonce, theirs, wanted)):
        raise BadFrame("wrong key: this is another run's join string")
    if sealed and not wanted:
        raise BadFrame("between hosts everything is encrypted")
    seal = Seal(key, nonce, theirs, calling=False) if wanted else None
    return coordinator_proof(key, nonce, theirs, wanted), seal


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


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


def member_proof(key: bytes, ours: bytes, theirs: bytes, sealed: bool) -> str:
    """Return the member's proof. `ours`: the coordinator's nonce; `theirs`: the member's."""
    return _proof(key, _MEMBER, ours, theirs, sealed)


def coordinator_proof(key: bytes, ours: bytes, theirs: bytes, sealed: bool) -> str:
    return _proof(key, _COORDINATOR, ours, theirs, sealed)


def _proof(key: bytes, label: bytes, ours: bytes, theirs: bytes, sealed: bool) -> str:
    return hmac.new(key, label + ours + theirs + bytes([sealed]), hashlib.sha256).hexdigest()


def is_proof(given: object, right: str) -> bool:
    """Compare in constant time."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), right.encode())


class Seal:
    """Encryption of frames between hosts, in both directions, as one side of a connection uses it.

    A frame that was changed, dropped or reordered on its way does not decrypt.
    """

    def __init__(self, key: bytes, coordinator: bytes, member: bytes, *, calling: bool) -> None:
        """`coordinator` and `member` are the nonces of the two; the member is `calling`."""
        found = keys(key, coordinator, member, calling=calling)
        self._out, self._in = Cipher(found.send), Cipher(found.receive)

    def closed(self, parts: Sequence[bytes]) -> bytes:
        """Encrypt a frame, given in parts."""
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


# Join strings.


KEY_BYTES = 32
_SCHEME = "echelon"
_FORM = f"{_SCHEME}://HOST:PORT/KEY, where KEY is {2 * KEY_BYTES} hexadecimal digits"


def join_string(host: str, port: int, key: bytes) -> str:
    """Return a run's join string. It is a secret: with it any process can take part in the run."""
    assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
    return f"{_SCHEME}://{f'[{host}]' if ':' in host else host}:{port}/{key.hex()}"


def read_join_string(text: str) -> tuple[str, int, bytes]:
    """Return host, port and key; raise `UserError` for anything that is not a join string."""
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError:  # a port out of range, brackets without an end
        raise UserError(_refusal(text)) from None
    key = parts.path.removeprefix("/")
    whole = not (parts.query or parts.fragment or parts.username or parts.password)
    right = parts.scheme == _SCHEME and host and port and whole
    if not right or not re.fullmatch(f"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", key):
        raise UserError(_refusal(text))
    assert host is not None
    assert port is not None
    return host, port, bytes.fromhex(key)


def _refusal(text: str) -> str:
    # The key may be the part that is right: it is not for the screen or a log.
    shown = re.sub(r"[0-9a-fA-F]{16,}", "…", text.strip())[:80]
    return f"{shown!r} is not a join string: it has the form {_FORM}"
