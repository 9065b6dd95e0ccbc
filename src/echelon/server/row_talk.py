"""What one trainer says to a shard about the rows of tables.

ROWS ahead      ids of the next batch: their rows, while the trainer is at work on this one
ROW_CHANGES     those rows again, where updates have changed them since
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.comm.channel import Connection, Frame
from echelon.comm.servers.messages import Kind
from echelon.comm.servers.row_messages import GONE, blank_state, most_rows, outline, unpack_rows
from echelon.comm.servers.row_room import (
    AREAS,
    LARGEST,
    PULLS,
    PUSHES,
    carve,
    pull_shapes,
    push_shapes,
)
from echelon.core.errors import PeerError
from echelon.optim.tables import Rows
from echelon.server.shard import Shard

_MOST_AHEAD = 1024
_LARGEST = 1 << 40


class _Ahead(NamedTuple):
    """What a trainer has of rows that it will ask for again."""

    held: Rows
    turn: int
    ids: Tensor
    rows: Tensor | None
    """Where they are, if that is shared memory."""


class RowTalk:
    """A part of a conversation; whoever makes no sense is hung up on."""

    def __init__(self, shard: Shard, connection: Connection, *, memory: bool) -> None:
        self._shard, self._connection, self._memory = shard, connection, memory
        self._areas: dict[int, Tensor] = {}
        """Memory that the trainer shares."""
        self._ahead: dict[int, _Ahead] = {}

    def rows(self, frame: Frame) -> None:
        head = unpack_rows(frame.head)
        held = self._shard.tables.at(head.table)
        if head.size > most_rows(held.spec.width):
            raise PeerError(f"asks for {head.size:,} rows of {held.spec.width} numbers at once")
        if head.shared:
            shapes = pull_shapes(head.size, held.spec.width)
            theirs, out = carve(self._area(head.area), head.place, shapes)
            ids = theirs.clone()  # the trainer may write there again, but these are remembered
        else:
            if frame.size != 8 * head.size:
                raise PeerError(f"asks for {head.size} rows with {frame.size:,} bytes of ids")
            ids, out = torch.empty(head.size, dtype=torch.int64), None
            self._connection.take([ids])
        turn = held.turn
        found = held.pull(ids, out)
        if head.area != PULLS:
            self._remember(frame.seq, _Ahead(held, turn, ids, out))
        self._answer(frame, body=() if head.shared else (found,))

    def changes(self, frame: Frame) -> None:
        """Those of rows that were sent ahead, each once."""
        number = unpack_rows(frame.head).place
        ahead = self._ahead.pop(number, None)
        if ahead is None or not self._shard.tables.has(ahead.held):
            self._answer(frame, GONE)
            return
        places, rows = ahead.held.changes(ahead.ids, ahead.turn)
        if ahead.rows is not None:
            ahead.rows.index_copy_(0, places, rows)
        self._answer(frame, body=() if ahead.rows is not None else (places, rows))

    def room(self, frame: Frame) -> None:
        match frame.fields():
            case {"area": int(area), "size": int(size)} if (
                self._memory and 0 <= area < AREAS and 0 < size <= LARGEST
            ):
                segment = self._connection.receive_segment(size)
                segment.close()
                self._areas[area] = segment.tensor
            case _:
                raise PeerError("memory for rows is shared that makes no sense")
        self._answer(frame)

    def state(self, frame: Frame) -> None:
        """How much of it there is, or a piece."""
        held = self._shard.tables.at(_table(frame))
        with self._shard.order.quiet():
            match frame.fields():
                case {"start": int(start), "count": int(count)} if (
                    0 <= start < _LARGEST and 0 < count < _LARGEST
                ):
                    part, following = held.part(start, count)
                    head = {
                        "outline": outline(part),
                        "next": -1 if following is None else following,
                    }
                    self._connection.send(Kind.ANSWER, head, list(part.values()), seq=frame.seq)
                case {"start": _, **_rest} | {"count": _, **_rest}:
                    raise PeerError("asks for a piece of a table that cannot be")
                case _:
                    head = {"outline": outline(held.blank())}
                    self._connection.send(Kind.ANSWER, head, seq=frame.seq)

    def load(self, frame: Frame) -> None:
        state = blank_state(frame.fields().get("outline"), frame.size)
        self._connection.take(list(state.values()))
        with self._shard.order.quiet():
            more = bool(frame.fields().get("more"))
            self._shard.tables.load(_table(frame), state, more=more)
        self._answer(frame)

    def gradients(self, frame: Frame, member: int) -> None:
        head = unpack_rows(frame.head)
        if head.shared:
            held = self._shard.tables.at(head.table)
            shapes = push_shapes(head.size, held.spec.width, head.counted)
            ids, *rest = carve(self._area(PUSHES), head.place, shapes)
            body = [held.own(ids), *rest]  # once looked at, they have to stay as they are
        else:
            body = self._shard.tables.blank(head, frame.size)
            self._connection.take(body)
        self._shard.tables.stage(member, frame.seq, head, body)

    def _remember(self, number: int, ahead: _Ahead) -> None:
        self._ahead[number] = ahead
        while len(self._ahead) > _MOST_AHEAD:  # a trainer that never comes back to them
            del self._ahead[next(iter(self._ahead))]

    def _answer(self, frame: Frame, head: bytes = b"", body: Sequence[Tensor] = ()) -> None:
        self._connection.send(Kind.ANSWER, head, body, seq=frame.seq)

    def _area(self, number: int) -> Tensor:
        if number not in self._areas:
            raise PeerError("speaks of rows in memory that is not shared")
        return self._areas[number]


def _table(frame: Frame) -> int:
    found = frame.fields().get("table")
    if type(found) is not int:
        raise PeerError(f"asks for table {found!r}")
    return found
