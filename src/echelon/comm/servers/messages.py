"""What trainers and shards say to each other, and shards among themselves.

Whatever is said once is JSON. What is said in every update is packed: a trainer's push, and what
became of it. Numbers that come from a peer are checked where they are unpacked or used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

from echelon.core.errors import PeerError
from echelon.core.types import Lease

MOST_IN_ROW = 16
MOST_CHUNKS = 1024
"""In one push's last frame."""
MOST_MISSING = 8192
"""Parameters without a gradient, in one push."""
CHUNK = 4 * 1024 * 1024
"""Bytes of a message with gradients or weights: worth its header, small enough to overlap."""


class Kind(IntEnum):
    """Of frames. Those that end in an answer are answered by ANSWER or REFUSED."""

    SET_UP = 32
    """trainer → shard: layout and rules; answered"""
    ROOM = 33
    """trainer → shard: segments follow (memory plane); answered"""
    UPLOAD = 34
    """trainer → shard: weights and optimizer state; answered"""
    ENTER = 35
    """trainer → gate: generation and members; answered"""
    GRADIENTS = 36
    """trainer → shard: a chunk"""
    PUSH = 37
    """trainer → shard: the last chunks, and what the push is; the gate gives an OUTCOME"""
    PULL = 38
    """trainer → gate; an OUTCOME follows"""
    CALL = 39
    """trainer → gate or shard: a question; answered"""
    STATE = 40
    """trainer → shard: the tensors of an upload; answered"""
    CUT = 41
    """trainer → shard: its part of a cut, please; answered twice, with bodies"""
    BYE = 42
    """trainer → shard, shard → gate: nothing follows"""
    ANSWER = 48
    REFUSED = 49
    WEIGHTS = 50
    """shard → trainer: a chunk"""
    GIVEN = 51
    """shard → trainer: the weights of this version are all there"""
    OUTCOME = 52
    """gate → trainer: the same, and what became of its push"""
    HELLO = 64
    """shard → gate: who it is and how far it came; answered"""
    SEGMENT = 65
    """shard → gate: may I have the weights' memory; answered, a segment may follow"""
    STAGED = 66
    """shard → gate: a push is here, whole"""
    ENTRY = 67
    """gate → shard: what to apply, and whom to give the weights"""
    SQUARES = 68
    """shard → gate: of its part of a round's gradient"""
    FACTOR = 69
    """gate → shard: by which the round is clipped"""
    MIRROR = 72
    """shard → twin: all there is; tensors follow"""
    DECIDED = 73
    """shard 0 → its twin: the gate's state, and entries"""
    APPLIED = 74
    """shard → twin: an entry; its gradient follows"""
    ACK = 75
    """twin → shard: received, whole"""
    ROWS = 80
    """trainer → shard: rows of sparse tables are asked for; answered, with a body"""
    ROW_GRADIENTS = 81
    """trainer → shard: gradients of rows, part of the push that follows"""
    ROW_STATE = 82
    """trainer → shard: what rows a table has, and perhaps all of them, please; answered"""
    ROW_LOAD = 83
    """trainer → shard: all rows of a table; answered"""
    ROW_ROOM = 84
    """trainer → shard: a segment for rows follows (memory plane); answered"""
    ROW_CHANGES = 85
    """trainer → shard: what has changed of rows that were sent ahead; answered, with a body"""


class Chunk(NamedTuple):
    """Values [start, stop) of one of a shard's ranges."""

    range: int
    start: int
    stop: int


class PushHead(NamedTuple):
    """What a push is: which samples, computed on which version, and what is summed with it."""

    generation: int
    lease: Lease
    based_on: int
    row: tuple[float, ...]
    finite: bool = True
    square: float = 0.0
    missing: tuple[int, ...] = ()
    """Parameters it has no gradient of."""
    chunks: tuple[Chunk, ...] = ()
    """What the frame's body holds."""


_CHUNK = struct.Struct("<HQQ")
_PUSH = struct.Struct("<qqqqqd?BHH")


def part(held: Sequence[Tensor], chunk: Chunk) -> Tensor:
    """The memory of a chunk that a peer speaks of, if there is such a one."""
    if chunk.range >= len(held) or not chunk.start < chunk.stop <= held[chunk.range].numel():
        raise PeerError(f"{chunk} lies outside of this shard's ranges")
    return held[chunk.range][chunk.start : chunk.stop]


def pack_chunk(chunk: Chunk) -> bytes:
    return _CHUNK.pack(*chunk)


def unpack_chunk(head: bytes) -> Chunk:
    if len(head) != _CHUNK.size:
        raise PeerError(f"a chunk's head of {len(head)} bytes, not {_CHUNK.size}")
    return Chunk(*_CHUNK.unpack(head))


def pack_push(push: PushHead) -> bytes:
    head = _PUSH.pack(
        push.generation,
        *push.lease,
        push.based_on,
        push.square,
        push.finite,
        len(push.row),
        len(push.missing),
        len(push.chunks),
    )
    row = struct.pack(f"<{len(push.row)}d", *push.row)
    missing = struct.pack(f"<{len(push.missing)}I", *push.missing)
    return head + row + missing + b"".join([_CHUNK.pack(*chunk) for chunk in push.chunks])


def unpack_push(head: bytes) -> PushHead:
    if len(head) < _PUSH.size:
        raise PeerError(f"a push's head of {len(head)} bytes")
    generation, *lease, based_on, square, finite, values, gaps, chunks = _PUSH.unpack_from(head)
    middle = _PUSH.size + 8 * values
    rest = middle + 4 * gaps
    few = values <= MOST_IN_ROW and gaps <= MOST_MISSING and chunks <= MOST_CHUNKS
    if not few or len(head) != rest + chunks * _CHUNK.size:
        raise PeerError(f"a push's head of {len(head)} bytes with {values} values, {chunks} chunks")
    return PushHead(
        generation,
        Lease(*lease),
        based_on,
        struct.unpack_from(f"<{values}d", head, _PUSH.size),
        finite,
        square,
        struct.unpack_from(f"<{gaps}I", head, middle),
        tuple(Chunk(*_CHUNK.unpack_from(head, rest + at * _CHUNK.size)) for at in range(chunks)),
    )
