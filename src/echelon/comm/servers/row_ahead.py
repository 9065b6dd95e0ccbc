"""Rows of the next batch, asked for while this one is computed.

    this batch                                     the next one
    forward ─▶ ROWS of the next ─▶ backward ─▶ push ─▶ forward: ROW_CHANGES ─▶ the same rows as a
               └─ the shards look them up meanwhile ─┘                        pull would give now

What updates have changed in between is sent again, and nothing else: so no result depends on what
was asked for ahead of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.comm.servers.link import Link
from echelon.comm.servers.messages import Kind
from echelon.comm.servers.row_messages import GONE, RowHead, most_rows, pack_rows
from echelon.comm.servers.row_room import AHEAD, AREAS, RowRooms, carve, pull_shapes, room_for
from echelon.comm.servers.row_shares import Sharing


class _Part(NamedTuple):
    """Of one shard."""

    link: Link
    number: int
    """Of the question."""
    rows: Tensor


class _Batch(NamedTuple):
    """What one pull will ask for."""

    table: int
    ids: Tensor
    width: int
    sharing: Sharing
    parts: list[_Part | None]


class RowsAhead:
    """Of one trainer: of the next batch, and of this one as long as it is not pulled."""

    def __init__(self, rooms: RowRooms) -> None:
        self._rooms = rooms
        self._areas = range(AHEAD, AREAS)
        self._turn = 0
        self._batches: list[_Batch] = []
        self._before: list[_Batch] = []

    def begin(self) -> None:
        """What is asked for from now on is of another batch. Of the last one, rows are in use."""
        self._turn += 1
        self._before, self._batches = self._batches, []

    def ask(self, links: Sequence[Link], table: int, ids: Tensor, width: int) -> None:
        if not 0 < len(ids) <= most_rows(width):
            return
        sharing = Sharing.of(ids, len(links))
        parts = [
            self._asked(link, table, part, width) if len(part) else None
            for link, part in zip(links, sharing.parts(ids), strict=True)
        ]
        self._batches.append(_Batch(table, ids, width, sharing, parts))

    def take(self, links: Sequence[Link], table: int, ids: Tensor) -> Tensor | None:
        """The rows as they are now; None if they have to be pulled.

        They are good until the batch after the next one is asked for.
        """
        batch = self._find(table, ids)
        if batch is None or len(batch.parts) != len(links):
            return None
        parts = [part for part in batch.parts if part is not None]
        if any(part.link is not links[part.link.address.index] for part in parts):
            return None
        what = "rows of the next batch"
        for part in parts:
            part.link.finish_early(part.number, what)
        head = RowHead(table, 0)
        for part in parts:
            question = pack_rows(head._replace(place=part.number))
            part.link.begin(Kind.ROW_CHANGES, question, what=what)
        # All are listened to, or an answer would be taken for that of another question.
        known = [self._renewed(part, what) for part in parts]
        if not all(known):
            return None
        nothing = torch.empty(0, batch.width)
        rows = [nothing if part is None else part.rows for part in batch.parts]
        return batch.sharing.joined(rows, batch.width)

    def drain(self, link: Link) -> None:
        """Before much is sent: while a shard is at sending, it listens to nobody."""
        for batch in self._batches:
            for part in batch.parts:
                if part is not None and part.link is link:
                    link.finish_early(part.number, "rows of the next batch")

    def _find(self, table: int, ids: Tensor) -> _Batch | None:
        for held in (self._before, self._batches):
            for at, batch in enumerate(held):
                if batch.table == table and (batch.ids is ids or torch.equal(batch.ids, ids)):
                    return held.pop(at)
        return None

    def _asked(self, link: Link, table: int, ids: Tensor, width: int) -> _Part:
        what, area = "rows of the next batch", self._areas[self._turn % len(self._areas)]
        head = RowHead(table, len(ids), area=area)
        if not link.memory:
            rows = torch.empty(len(ids), width)
            number = link.begin_early(Kind.ROWS, pack_rows(head), [ids], [rows], what)
            return _Part(link, number, rows)
        shapes = pull_shapes(len(ids), width)
        memory, place = self._rooms.of(link).more(area, self._turn, room_for(shapes))
        theirs, rows = carve(memory, place, shapes)
        theirs.copy_(ids)
        question = pack_rows(head._replace(shared=True, place=place))
        number = link.begin_early(Kind.ROWS, question, [], [], what)
        return _Part(link, number, rows)

    def _renewed(self, part: _Part, what: str) -> bool:
        """Whether the shard knew what it had sent."""
        frame = part.link.answer(what)
        if frame.size:
            changed = frame.size // (8 + 4 * part.rows.shape[1])
            places = torch.empty(changed, dtype=torch.int64)
            rows = torch.empty(changed, part.rows.shape[1])
            part.link.take([places, rows], what)
            part.link.pulled += rows.nbytes
            part.rows.index_copy_(0, places, rows)
        return frame.head != GONE
