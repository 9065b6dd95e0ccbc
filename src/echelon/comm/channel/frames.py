"""Frame header, buffers.

Frames: a fixed header, a short head of structs or JSON, a body of raw bytes.

     0      4        5     6     8            12    20           28          32      36
    ┌──────┬────────┬─────┬─────┬────────────┬─────┬────────────┬───────────┬───────┬─ ─ ─┬─ ─ ─┐
    │ magic│version │kind │zero │head length │ seq │body length │head check │ check │head │body │
    └──────┴────────┴─────┴─────┴────────────┴─────┴────────────┴───────────┴───────┴─ ─ ─┴─ ─ ─┘

Little-endian. The checks are CRC-32, of the head and of all before; the last one starts from a
value that both ends derive for each frame: a frame that is lost, doubled, cut or of another
connection does not fit. No length is believed before it does, nor above what the receiver allows.
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

# --- frames ---

VERSION = 1
"""Of frames and handshake. Both ends need the same one."""
MAGIC = b"ECHf"
HEADER = 36
HEAD_LIMIT = 64 * 1024

OWN = 240
"""Kinds from here on are the channel's own."""
PING = 255
SEGMENT = 254
PING_START = MAGIC + bytes([VERSION, PING])
"""What a ping begins with."""
_KNOWN = (PING, SEGMENT)

_FIELDS = struct.Struct("<4sBBHIQQI")
_CHECK = struct.Struct("<I")
_CHECKED = _FIELDS.size
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Frame(NamedTuple):
    """What came, but for its body: that is taken from the connection."""

    kind: int
    seq: int
    head: bytes
    size: int
    """Bytes of the body."""

    def fields(self) -> dict[str, Any]:
        """The head, where it is a JSON object."""
        try:
            found = json.loads(self.head)
        except (ValueError, RecursionError):
            raise PeerError(f"the head of a frame of kind {self.kind} is not JSON") from None
        if not isinstance(found, dict):
            raise PeerError(f"the head of a frame of kind {self.kind} is not a JSON object")
        return found


class Header(NamedTuple):
    """As it is on the wire."""

    kind: int
    head: int
    seq: int
    body: int
    head_check: int


def head_bytes(head: Mapping[str, Any] | bytes) -> bytes:
    found = head if isinstance(head, bytes) else _JSON.encode(head).encode()
    if len(found) > HEAD_LIMIT:
        raise ValueError(f"a head of {len(found):,} bytes is over the limit of {HEAD_LIMIT:,}")
    return found


def pack(kind: int, seq: int, head: bytes, body: int, start: int, *, sealed: bool = False) -> bytes:
    """The header. Of a sealed head there is no check: it would show something of it."""
    if not (0 <= kind < OWN or kind in _KNOWN):
        raise ValueError(f"{kind} is no kind of frame: 0 to {OWN - 1}")
    fields = _FIELDS.pack(
        MAGIC, VERSION, kind, 0, len(head), seq, body, 0 if sealed else crc32(head)
    )
    return fields + _CHECK.pack(crc32(fields, start))


def parse(data: memoryview, start: int, limit: int) -> Header:
    """The header that `data` is, all checked but the head."""
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
    """The head that `data` is, if it is the one that was sent."""
    head = bytes(data)
    if crc32(head) != header.head_check:
        raise PeerError("the head of a frame was changed on its way")
    return head


# --- buffers ---
# Tensors as the bytes they are, and bytes in chunks.

Buffer = Tensor | memoryview | bytearray | bytes
CHUNK = 1 << 20
"""Bytes after which progress is reported."""
NOTHING = memoryview(bytearray())


_WRITABLE = 0x200
_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory.restype = ctypes.py_object


def view(buffer: Buffer) -> memoryview:
    """The bytes themselves, no copy. Those of a tensor live as long as the tensor does."""
    if not isinstance(buffer, Tensor):
        return memoryview(buffer).cast("B")
    if not buffer.is_contiguous() or not buffer.is_cpu:
        raise ValueError("only contiguous tensors in main memory go over the wire")
    size = buffer.numel() * buffer.element_size()
    # Any dtype, and a third of the time that the way through numpy takes.
    return _memory(buffer.data_ptr(), size, _WRITABLE) if size else NOTHING


def chunks(views: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """`size` bytes at a time of all of them together, in one piece or more."""
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
    """What is left of them without the first `count` bytes."""
    for at, whole in enumerate(views):
        if count < len(whole):
            return [whole[count:], *views[at + 1 :]]
        count -= len(whole)
    return []
