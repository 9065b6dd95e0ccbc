"""JSON that may be longer than a frame's head: it travels as a body."""

from __future__ import annotations

import json
from typing import Any

from echelon.comm.channel import Connection, Frame
from echelon.core.errors import PeerError

LIMIT = 256 * 1024 * 1024
"""Bytes: a layout of a million parameters has less."""


def to_bytes(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def take(connection: Connection, frame: Frame) -> Any:
    """The document that came with a frame."""
    if not 0 < frame.size <= LIMIT:
        raise PeerError(f"a document of {frame.size:,} bytes; 1 to {LIMIT:,} are taken")
    try:
        return json.loads(connection.take_bytes())
    except (ValueError, RecursionError):
        raise PeerError("a document that came is not JSON") from None
