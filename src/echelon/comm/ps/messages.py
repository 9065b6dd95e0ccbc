"""Every message between trainers and servers.

What trainers and shards say to each other, and shards among themselves.

Whatever is said once is JSON. What is said in every update is packed: a trainer's push, and what
became of it. Numbers that come from a peer are checked where they are unpacked or used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.comm.channel import Connection, Frame
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


# Where the servers are


@dataclass(frozen=True, slots=True)
class Directory:
    """Of one trainer in one generation."""

    shards: tuple[ShardAddress, ...]
    key: bytes
    """Of the run: whoever knows it may take part."""
    member: int
    """This trainer's number, which no other trainer of the run ever had."""
    generation: int
    members: tuple[int, ...]
    """All trainers of the generation."""
    deadline: float
    halted: Callable[[], str | None]
    """Why nobody is to be waited for any more, if so."""


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """One shard. It may move to another process, but its address stays."""

    index: int
    host: str
    port: int
    name: str = ""
    """Its abstract unix socket, for those on the same host; empty if it has none."""

    def __str__(self) -> str:
        return f"shard {self.index} at {self.host}:{self.port}"


# Pushes and what became of them


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


class Chunk(NamedTuple):
    """Values [start, stop) of one of a shard's ranges."""

    range: int
    start: int
    stop: int


def pack_chunk(chunk: Chunk) -> bytes:
    return _CHUNK.pack(*chunk)


def unpack_chunk(head: bytes) -> Chunk:
    if len(head) != _CHUNK.size:
        raise PeerError(f"a chunk's head of {len(head)} bytes, not {_CHUNK.size}")
    return Chunk(*_CHUNK.unpack(head))


def part(held: Sequence[Tensor], chunk: Chunk) -> Tensor:
    """The memory of a chunk that a peer speaks of, if there is such a one."""
    if chunk.range >= len(held) or not chunk.start < chunk.stop <= held[chunk.range].numel():
        raise PeerError(f"{chunk} lies outside of this shard's ranges")
    return held[chunk.range][chunk.start : chunk.stop]


FATES = ("applied", "done", "late", "refused", "void", "pulled")
MOST_VALUES, LONGEST_REASON = 64, 4096


class Outcome(NamedTuple):
    """`applied`: it is part of `version`. `done`: its samples were applied before. `late`,
    `refused`, `void`: nothing came of it, for `reason`; its lease goes back."""

    kind: str
    version: int
    staleness: int = 0
    row: tuple[float, ...] = ()
    """Sums over all pushes that were applied since this trainer's last outcome."""
    asked: int = 0
    share: float = 0.0
    """Samples of this trainer's next push; 0 where nobody has a say in that."""
    reason: str = ""
    weights: bool = False
    """Whether the weights of `version` come with it."""

    def pack(self) -> bytes:
        reason = self.reason.encode()[:LONGEST_REASON]
        head = _OUTCOME_HEAD.pack(
            FATES.index(self.kind),
            self.weights,
            self.version,
            self.staleness,
            self.asked,
            self.share,
            len(self.row),
            len(reason),
        )
        return head + struct.pack(f"<{len(self.row)}d", *self.row) + reason

    @classmethod
    def unpack(cls, head: bytes) -> Outcome:
        if len(head) < _OUTCOME_HEAD.size:
            raise PeerError(f"an outcome of {len(head)} bytes")
        kind, weights, version, staleness, asked, share, values, length = _OUTCOME_HEAD.unpack_from(
            head
        )
        start = _OUTCOME_HEAD.size + 8 * values
        if kind >= len(FATES) or values > MOST_VALUES or len(head) != start + length:
            raise PeerError(f"an outcome of {len(head)} bytes that makes no sense")
        row = struct.unpack_from(f"<{values}d", head, _OUTCOME_HEAD.size)
        reason = head[start:].decode(errors="replace")
        return cls(FATES[kind], version, staleness, row, asked, share, reason, weights)


_PUSH = struct.Struct("<qqqqqd?BHH")
_CHUNK = struct.Struct("<HQQ")
_OUTCOME_HEAD = struct.Struct("<B?qqqdBH")


# Rows


MOST_TABLES = 256
PIECE = 64 << 20
"""Bytes of values in one message, at most."""
SOME = 8 << 20
"""Bytes of rows on their way into a checkpoint: as many as whoever writes it has to hold."""
GONE = b"gone"
"""Head of an answer: nothing is known of rows that were sent ahead, all may be others."""


class RowHead(NamedTuple):
    """So many rows of a table; with a count of each, or without."""

    table: int
    size: int
    counted: bool = False
    more: bool = False
    """Whether they go with those of the message before; or else they take their place."""
    shared: bool = False
    """Whether they lie in shared memory, at `place`; or else they are the message's body."""
    place: int = 0
    area: int = 0
    """Of shared memory; and whether these are rows of the next batch, or of this one."""


def most_rows(width: int) -> int:
    """That are asked for, or sent, in one message."""
    return max(1, PIECE // (4 * width))


def pack_rows(head: RowHead) -> bytes:
    flags = head.counted | head.more << 1 | head.shared << 2 | head.area << 3
    return _HEAD.pack(head.table, head.size, flags, head.place)


def unpack_rows(head: bytes) -> RowHead:
    if len(head) != _HEAD.size:
        raise PeerError(f"a head of {len(head)} bytes about rows, not {_HEAD.size}")
    table, size, flags, place = _HEAD.unpack(head)
    return RowHead(
        table, size, bool(flags & 1), bool(flags & 2), bool(flags & 4), place, flags >> 3
    )


def outline(state: Mapping[str, Tensor]) -> list[list[Any]]:
    """Names, types and shapes of tensors, in their order."""
    return [
        [name, str(value.dtype).removeprefix("torch."), *value.shape]
        for name, value in state.items()
    ]


def blank_state(lines: Any, size: int | None, device: str = "cpu") -> dict[str, Tensor]:
    """Room for what an outline says, if all of it together has this size in bytes."""
    if not isinstance(lines, list) or not 0 < len(lines) <= _MOST_COLUMNS:
        raise PeerError("the rows of a table must come with an outline")
    shapes = dict(_shape(line) for line in lines)
    due = sum(_bytes(dtype, shape) for dtype, shape in shapes.values())
    if len(shapes) != len(lines) or (size is not None and due != size):
        raise PeerError(f"the rows of a table have {size} bytes, their outline says {due}")
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (dtype, shape) in shapes.items()
    }


def _shape(line: Any) -> tuple[str, tuple[torch.dtype, list[int]]]:
    match line:
        case [str(name), str(kind), *shape] if (
            kind in _KINDS
            and len(shape) in (1, 2)
            and all(type(side) is int and 0 <= side < 1 << 40 for side in shape)
        ):
            return name, (_KINDS[kind], shape)
    raise PeerError("an outline of rows makes no sense")


def _bytes(dtype: torch.dtype, shape: list[int]) -> int:
    size = dtype.itemsize
    for side in shape:
        size *= side
    return size


def pieces(state: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Of sizes that travel well; at least one."""
    each = max(1, sum(value[:1].nbytes for name, value in state.items() if name != "facts"))
    most = max(len(value) for name, value in state.items() if name.endswith("ids"))
    step = max(1, PIECE // each)
    for start in range(0, max(1, most), step):
        yield {
            name: value if name == "facts" else value[start : start + step]
            for name, value in state.items()
        }


_HEAD = struct.Struct("<HIBQ")
_KINDS = {
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
}


_MOST_COLUMNS = 16


# Docs


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
