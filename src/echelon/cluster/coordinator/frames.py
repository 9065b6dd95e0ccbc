"""Frames: four bytes of length (big-endian), then one JSON object that says its "kind"."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from echelon.core.errors import PeerError

LIMIT = 1 << 20
"""Bytes of the largest frame. Members who have not shown the key yet get `SHORT`."""
SHORT = 1 << 10
HEAD = 4

Message = dict[str, Any]


class BadFrame(PeerError):
    """What came over the wire is not what was agreed upon."""


class Tampered(BadFrame):
    """An encrypted frame is not what was sent: somebody in between is at fault, not its sender."""


def _no_number(text: str) -> NoReturn:
    raise BadFrame(f"a frame has the value {text}, which is not JSON")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_no_number)


def encode(kind: str, **fields: Any) -> bytes:
    body = _ENCODER.encode({"kind": kind, **fields}).encode()
    return head(len(body)) + body


def common_part(fields: Message) -> bytes:
    """What many frames have in common, encoded once; for `encode_with`."""
    assert fields, "an object that is a part of another has a field"
    return _ENCODER.encode(fields).encode()[1:]


def encode_with(common: bytes, kind: str, **fields: Any) -> tuple[bytes, bytes]:
    """A frame in two parts, of which the second is `common` itself and takes no more memory."""
    own = _ENCODER.encode({"kind": kind, **fields}).encode()[:-1] + b","
    return head(len(own) + len(common)) + own, common


def head(length: int, more: int = 0) -> bytes:
    """The first bytes of a frame; `more`: what encryption adds to it."""
    if length > LIMIT + more:
        raise BadFrame(f"a frame of {length:,} bytes is over the limit of {LIMIT:,}")
    return length.to_bytes(HEAD, "big")


class Decoder:
    """Takes bytes as they come, gives messages; never holds more than one frame and what came."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.opened: Callable[[bytes], bytes] | None = None
        """Decrypts the frames from here on."""
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes. A length over the limit is refused at once."""
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
