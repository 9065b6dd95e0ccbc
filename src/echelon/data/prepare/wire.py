"""Messages between the parent and a worker: JSON, and bytes beside it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_HEADER = struct.Struct("<QQ")


class Gone(Exception):
    """The other end is not there any more."""


def send(wire: socket.socket, message: Mapping[str, Any], data: bytes | memoryview = b"") -> None:
    text = json.dumps(message).encode()
    try:
        wire.sendall(_HEADER.pack(len(text), len(data)))
        wire.sendall(text)
        wire.sendall(data)
    except TimeoutError:
        raise
    except OSError as error:
        raise Gone(error.strerror) from None


def receive(wire: socket.socket) -> tuple[dict[str, Any], bytearray]:
    text, data = _HEADER.unpack(_exactly(wire, _HEADER.size))
    message: dict[str, Any] = json.loads(_exactly(wire, text))
    return message, _exactly(wire, data)


def _exactly(wire: socket.socket, size: int) -> bytearray:
    whole = bytearray(size)
    rest = memoryview(whole)
    while rest:
        try:
            got = wire.recv_into(rest)
        except TimeoutError:
            raise
        except OSError as error:
            raise Gone(error.strerror) from None
        if not got:
            raise Gone("closed")
        rest = rest[got:]
    return whole
