"""The format of frames: a fixed header, a short head of structs or JSON, a body of raw bytes.

     0      4        5     6     8            12    20           28          32      36
    ┌──────┬────────┬─────┬─────┬────────────┬─────┬────────────┬───────────┬───────┬─ ─ ─┬─ ─ ─┐
    │ magic│version │kind │zero │head length │ seq │body length │head check │ check │head │body │
    └──────┴────────┴─────┴─────┴────────────┴─────┴────────────┴───────────┴───────┴─ ─ ─┴─ ─ ─┘

Little-endian. Both checks are CRC-32: the head check covers the head, the check covers all header
fields before it. The check starts from a value that both ends derive for each frame, so a frame
that was lost, doubled, cut or sent on another connection fails it. The receiver uses no length
before this check, and none above the limit that it has set.

`pack` and `parse` write and read headers. The functions at the end give the bytes of a body without
a copy. How frames travel, plain or encrypted, is in `echelon.comm.channel.stream`.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor

from echelon.core.errors import PeerError

VERSION = 1
"""Protocol version of frames and handshake. Both ends need the same one."""
MAGIC = b"ECHf"
HEADER = 36
HEAD_LIMIT = 64 * 1024
OWN = 240
"""Kinds from here on belong to the channel itself; smaller ones belong to its users."""
PING = 255
SEGMENT = 254
PING_START = MAGIC + bytes([VERSION, PING])
"""The first bytes of every ping."""
_KNOWN = (PING, SEGMENT)
_FIELDS = struct.Struct("<4sBBHIQQI")
_CHECK = struct.Struct("<I")
_CHECKED = _FIELDS.size
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Frame(NamedTuple):
    """A received frame without its body, which `Connection.take` reads."""

    kind: int
    seq: int
    head: bytes
    size: int
    """Bytes of the body."""

    def fields(self) -> dict[str, Any]:
        """Return the head as a JSON object; PeerError if it is none."""
        try:
            found = json.loads(self.head)
        except (ValueError, RecursionError):
            raise PeerError(f"the head of a frame of kind {self.kind} is not JSON") from None
        if not isinstance(found, dict):
            raise PeerError(f"the head of a frame of kind {self.kind} is not a JSON object")
        return found


def head_bytes(head: Mapping[str, Any] | bytes) -> bytes:
    """Return a head as it is sent: bytes as they are, a mapping as JSON."""
    found = head if isinstance(head, bytes) else _JSON.encode(head).encode()
    if len(found) > HEAD_LIMIT:
        raise ValueError(f"a head of {len(found):,} bytes is over the limit of {HEAD_LIMIT:,}")
    return found


def pack(kind: int, seq: int, head: bytes, body: int, start: int, *, sealed: bool = False) -> bytes:
    """Return the header of a frame. `start` is the start value of its check.

    A sealed head has no check of its own, which would reveal something about it.
    """
    if not (0 <= kind < OWN or kind in _KNOWN):
        raise ValueError(f"{kind} is no kind of frame: 0 to {OWN - 1}")
    fields = _FIELDS.pack(
        MAGIC, VERSION, kind, 0, len(head), seq, body, 0 if sealed else crc32(head)
    )
    return fields + _CHECK.pack(crc32(fields, start))


class Header(NamedTuple):
    """The fields of a frame's header. `head` and `body` are lengths in bytes."""

    kind: int
    head: int
    seq: int
    body: int
    head_check: int


def parse(data: memoryview, start: int, limit: int) -> Header:
    """Return the header in `data` after checking everything but the head.

    `start` is the start value of its check, `limit` the largest body allowed.
    """
    magic, version, kind, zero, head, seq, body, head_check = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise PeerError("what came is no frame")
    if version != VERSION:
        raise PeerError(f"a frame has protocol version {version}; {VERSION} is spoken here")
    if crc32(data[:_CHECKED], start) != _CHECK.unpack_from(data, _CHECKED)[0]:
        raise PeerError("a frame was changed, lost or doubled on its way")
    if zero or not (kind < OWN or kind in _KNOWN):
        raise PeerError(f"a frame of kind {kind} is not known")
    if head > HEAD_LIMIT:
        raise PeerError(f"a head of {head:,} bytes is over the limit of {HEAD_LIMIT:,}")
    if body > limit:
        raise PeerError(f"a body of {body:,} bytes is over the limit of {limit:,}")
    return Header(kind, head, seq, body, head_check)


def read_head(header: Header, data: memoryview) -> bytes:
    """Return `data` as bytes if it is the head that was sent."""
    head = bytes(data)
    if crc32(head) != header.head_check:
        raise PeerError("the head of a frame was changed on its way")
    return head


# The bytes of a body, without a copy


Buffer = Tensor | memoryview | bytearray | bytes
CHUNK = 1 << 20
"""Bytes of a body between two reports of progress."""
NOTHING = memoryview(bytearray())
_WRITABLE = 0x200  # PyBUF_WRITE
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory.restype = ctypes.py_object


def view(buffer: Buffer) -> memoryview:
    """Return the bytes of a buffer without a copy. A tensor's are valid while the tensor lives."""
    if not isinstance(buffer, Tensor):
        return memoryview(buffer).cast("B")
    if not buffer.is_contiguous() or not buffer.is_cpu:
        raise ValueError("only contiguous tensors in main memory go over the wire")
    size = buffer.numel() * buffer.element_size()
    # Works for any dtype, and takes a third of the time of the way through numpy.
    return _memory(buffer.data_ptr(), size, _WRITABLE) if size else NOTHING


def chunks(views: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Cut the concatenation of all views into chunks of `size` bytes.

    A chunk is a list of pieces; the last chunk may be shorter.
    """
    gathered: list[memoryview] = []
    room = size
    for whole in views:
        at = 0
        while at < len(whole):
            piece = whole[at : at + room]
            gathered.append(piece)
            at += len(piece)
            room -= len(piece)
            if not room:
                yield gathered
                gathered, room = [], size
    if gathered:
        yield gathered


def after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return what remains of the views without their first `count` bytes."""
    for at, whole in enumerate(views):
        if count < len(whole):
            return [whole[count:], *views[at + 1 :]]
        count -= len(whole)
    return []
