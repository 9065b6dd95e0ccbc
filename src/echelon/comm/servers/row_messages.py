"""Messages about rows of tables: ids and values travel as they are, behind a small head.

trainer                                   shard
ROWS table, n; ids              ─────────▶
◀───────── ANSWER; rows                            looking makes no rows
ROW_CHANGES number of a ROWS    ─────────▶         of the next batch, asked for ahead of its time
◀───────── ANSWER; places, rows                    those that updates have changed since
ROW_GRADIENTS table, n; ids, sums, counts ▶ staged, until the PUSH of the same number has its fate
ROW_STATE table                 ─────────▶
◀───────── ANSWER names, shapes                    of all of it
ROW_STATE table, start, count   ─────────▶
◀───────── ANSWER names, shapes, next; tensors     a piece of it, and where the next one starts
ROW_LOAD table, names, shapes; tensors ──▶         in pieces: the first one clears the table
◀───────── ANSWER
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.core.errors import PeerError

MOST_TABLES = 256
PIECE = 64 << 20
"""Bytes of values in one message, at most."""
SOME = 8 << 20
"""Bytes of rows on their way into a checkpoint: as many as whoever writes it has to hold."""
GONE = b"gone"
"""Head of an answer: nothing is known of rows that were sent ahead, all may be others."""
_HEAD = struct.Struct("<HIBQ")
_KINDS = {
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
}
_MOST_COLUMNS = 16


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
