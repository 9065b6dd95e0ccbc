"""All messages between trainers and shards, and between the shards of a parameter server.

`Kind` lists them. Rare messages are JSON. Messages of every update are packed: a trainer's push,
its outcome, and rows of tables. Numbers that come from a peer are checked where they are unpacked
or used.
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


class Kind(IntEnum):
    """The kind of a frame. An "answered" one is answered by ANSWER or REFUSED."""

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
    """trainer → shard: the last chunks, and a `PushHead`; the gate sends an OUTCOME"""
    PULL = 38
    """trainer → gate; an OUTCOME follows"""
    CALL = 39
    """trainer → gate or shard: a question; answered"""
    STATE = 40
    """trainer → shard: the tensors of an upload; answered"""
    CUT = 41
    """trainer → shard: asks for its part of a checkpoint; answered twice, with bodies"""
    BYE = 42
    """trainer → shard, shard → gate: nothing follows"""
    ANSWER = 48
    REFUSED = 49
    WEIGHTS = 50
    """shard → trainer: a chunk"""
    GIVEN = 51
    """shard → trainer: the weights of this version are all there"""
    OUTCOME = 52
    """gate → trainer: like GIVEN, and the outcome of its push"""
    HELLO = 64
    """shard → gate: which shard it is and how far it has come; answered"""
    SEGMENT = 65
    """shard → gate: asks for the weights' memory; answered, a segment may follow"""
    STAGED = 66
    """shard → gate: a push is here completely"""
    ENTRY = 67
    """gate → shard: what to apply, and which trainers to send the weights to"""
    SQUARES = 68
    """shard → gate: the squares of its part of a round's gradient"""
    FACTOR = 69
    """gate → shard: the factor that clips the round's gradient"""
    MIRROR = 72
    """shard → replica: its whole state; tensors follow"""
    DECIDED = 73
    """shard 0 → its replica: the gate's state, and entries"""
    APPLIED = 74
    """shard → replica: an entry; its gradient follows"""
    ACK = 75
    """replica → shard: received completely"""
    ROWS = 80
    """trainer → shard: asks for rows of a table; answered, with a body"""
    ROW_GRADIENTS = 81
    """trainer → shard: gradients of rows, part of the push that follows"""
    ROW_STATE = 82
    """trainer → shard: asks for the outline of a table's rows, or for some of them; answered"""
    ROW_LOAD = 83
    """trainer → shard: all rows of a table; answered"""
    ROW_ROOM = 84
    """trainer → shard: a segment for rows follows (memory plane); answered"""
    ROW_CHANGES = 85
    """trainer → shard: asks what has changed of rows sent ahead; answered, with a body"""


# Where the servers are


@dataclass(frozen=True, slots=True)
class Directory:
    """What one trainer has to know about the servers in one generation."""

    shards: tuple[ShardAddress, ...]
    key: bytes
    """The run's key: a process that knows it may take part."""
    member: int
    """This trainer's number, which no other trainer of the run ever has."""
    generation: int
    members: tuple[int, ...]
    """All trainers of the generation."""
    deadline: float
    halted: Callable[[], str | None]
    """Returns a reason to end all waiting, or None."""


@dataclass(frozen=True, slots=True)
class ShardAddress:
    """One shard. It may move to another process, but its address stays."""

    index: int
    host: str
    port: int
    name: str = ""
    """Its abstract unix socket, for trainers on the same host; empty if it has none."""

    def __str__(self) -> str:
        return f"shard {self.index} at {self.host}:{self.port}"


# Pushes and their outcomes

MOST_IN_ROW = 16
MOST_CHUNKS = 1024
"""Chunks in the PUSH frame itself."""
MOST_MISSING = 8192
"""Parameters without a gradient, in one push."""
CHUNK = 4 * 1024 * 1024
"""Bytes of a message with gradients or weights: worth its header, small enough to overlap."""
FATES = ("applied", "done", "late", "refused", "void", "pulled")
MOST_VALUES, LONGEST_REASON = 64, 4096
_PUSH_HEAD = struct.Struct("<qqqqqd?BHH")
_CHUNK_HEAD = struct.Struct("<HQQ")
_OUTCOME_HEAD = struct.Struct("<B?qqqdBH")


class PushHead(NamedTuple):
    """The head of a push: which samples, computed with which version, and the values to sum."""

    generation: int
    lease: Lease
    based_on: int
    row: tuple[float, ...]
    finite: bool = True
    square: float = 0.0
    missing: tuple[int, ...] = ()
    """Parameters without a gradient."""
    chunks: tuple[Chunk, ...] = ()
    """The chunks in the frame's body."""


def pack_push(push: PushHead) -> bytes:
    head = _PUSH_HEAD.pack(
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
    return head + row + missing + b"".join([_CHUNK_HEAD.pack(*chunk) for chunk in push.chunks])


def unpack_push(head: bytes) -> PushHead:
    if len(head) < _PUSH_HEAD.size:
        raise PeerError(f"a push's head of {len(head)} bytes")
    generation, *lease, based_on, square, finite, values, gaps, chunks = _PUSH_HEAD.unpack_from(
        head
    )
    middle = _PUSH_HEAD.size + 8 * values
    rest = middle + 4 * gaps
    few = values <= MOST_IN_ROW and gaps <= MOST_MISSING and chunks <= MOST_CHUNKS
    if not few or len(head) != rest + chunks * _CHUNK_HEAD.size:
        raise PeerError(f"a push's head of {len(head)} bytes with {values} values, {chunks} chunks")
    return PushHead(
        generation,
        Lease(*lease),
        based_on,
        struct.unpack_from(f"<{values}d", head, _PUSH_HEAD.size),
        finite,
        square,
        struct.unpack_from(f"<{gaps}I", head, middle),
        tuple(
            Chunk(*_CHUNK_HEAD.unpack_from(head, rest + at * _CHUNK_HEAD.size))
            for at in range(chunks)
        ),
    )


class Chunk(NamedTuple):
    """Values [start, stop) of one of a shard's ranges."""

    range: int
    start: int
    stop: int


def pack_chunk(chunk: Chunk) -> bytes:
    return _CHUNK_HEAD.pack(*chunk)


def unpack_chunk(head: bytes) -> Chunk:
    if len(head) != _CHUNK_HEAD.size:
        raise PeerError(f"a chunk's head of {len(head)} bytes, not {_CHUNK_HEAD.size}")
    return Chunk(*_CHUNK_HEAD.unpack(head))


def part(held: Sequence[Tensor], chunk: Chunk) -> Tensor:
    """Return the memory of a chunk that a peer names; PeerError if there is no such chunk."""
    if chunk.range >= len(held) or not chunk.start < chunk.stop <= held[chunk.range].numel():
        raise PeerError(f"{chunk} lies outside of this shard's ranges")
    return held[chunk.range][chunk.start : chunk.stop]


class Outcome(NamedTuple):
    """The gate's answer to a push or a pull. `kind` is one of `FATES`:

    applied                 the push is part of `version`
    done                    its samples had been applied before
    late, refused, void     the push was dropped for `reason`; its lease goes back
    pulled                  the answer to a pull
    """

    kind: str
    version: int
    staleness: int = 0
    row: tuple[float, ...] = ()
    """Sums over all pushes that were applied since this trainer's last outcome."""
    asked: int = 0
    """Bits of `core.types.Ask`: what trainers want all to do after their updates."""
    share: float = 0.0
    """Samples of this trainer's next push; 0 if the servers do not set it."""
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


# Rows of tables: ids and values travel as they are, behind a small head
#
# trainer                                   shard
# ROWS table, n; ids              ─────────▶
# ◀───────── ANSWER; rows                            a lookup creates no rows
# ROW_CHANGES number of a ROWS    ─────────▶         of the next batch, sent ahead of its time
# ◀───────── ANSWER; places, rows                    those that updates have changed since
# ROW_GRADIENTS table, n; ids, sums, counts ▶ staged, until the PUSH of the same number is decided
# ROW_STATE table                 ─────────▶
# ◀───────── ANSWER names, shapes                    of the whole table
# ROW_STATE table, start, count   ─────────▶
# ◀───────── ANSWER names, shapes, next; tensors     a piece of it, and where the next one starts
# ROW_LOAD table, names, shapes; tensors ──▶         in pieces: the first one clears the table
# ◀───────── ANSWER

MOST_TABLES = 256
PIECE = 64 << 20
"""Bytes of values in one message, at most."""
SOME = 8 << 20
"""Bytes of rows fetched at a time for a checkpoint: this much the trainer has to hold."""
GONE = b"gone"
"""Head of an answer to ROW_CHANGES: the shard no longer knows which rows it sent ahead."""
_ROW_HEAD = struct.Struct("<HIBQ")
_KINDS = {
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
}


_MOST_COLUMNS = 16


class RowHead(NamedTuple):
    """The head of a message about `size` rows of a table."""

    table: int
    size: int
    counted: bool = False
    more: bool = False
    """Whether they are added to the rows of the message before, instead of replacing them."""
    shared: bool = False
    """Whether they lie in shared memory, at `place`, instead of in the message's body."""
    place: int = 0
    area: int = 0
    """Area of shared memory, which also says whether the rows are of this batch or of the next."""


def pack_rows(head: RowHead) -> bytes:
    flags = head.counted | head.more << 1 | head.shared << 2 | head.area << 3
    return _ROW_HEAD.pack(head.table, head.size, flags, head.place)


def unpack_rows(head: bytes) -> RowHead:
    if len(head) != _ROW_HEAD.size:
        raise PeerError(f"a head of {len(head)} bytes about rows, not {_ROW_HEAD.size}")
    table, size, flags, place = _ROW_HEAD.unpack(head)
    return RowHead(
        table, size, bool(flags & 1), bool(flags & 2), bool(flags & 4), place, flags >> 3
    )


def most_rows(width: int) -> int:
    """Return how many rows of this width may go into one message."""
    return max(1, PIECE // (4 * width))


def outline(state: Mapping[str, Tensor]) -> list[list[Any]]:
    """Return names, types and shapes of tensors, in their order."""
    return [
        [name, str(value.dtype).removeprefix("torch."), *value.shape]
        for name, value in state.items()
    ]


def blank_state(lines: Any, size: int | None, device: str = "cpu") -> dict[str, Tensor]:
    """Return empty tensors as in a peer's outline, which together must have `size` bytes."""
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
    """Cut the rows of a table into pieces for one message each; at least one piece."""
    each = max(1, sum(value[:1].nbytes for name, value in state.items() if name != "facts"))
    most = max(len(value) for name, value in state.items() if name.endswith("ids"))
    step = max(1, PIECE // each)
    for start in range(0, max(1, most), step):
        yield {
            name: value if name == "facts" else value[start : start + step]
            for name, value in state.items()
        }


# Documents: JSON that may be longer than a frame's head travels as a body

LIMIT = 256 * 1024 * 1024
"""Bytes of the largest document: a layout of a million parameters has fewer."""


def to_bytes(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def take(connection: Connection, frame: Frame) -> Any:
    """Receive the document that is a frame's body."""
    if not 0 < frame.size <= LIMIT:
        raise PeerError(f"a document of {frame.size:,} bytes; 1 to {LIMIT:,} are taken")
    try:
        return json.loads(connection.take_bytes())
    except (ValueError, RecursionError):
        raise PeerError("a document that came is not JSON") from None
