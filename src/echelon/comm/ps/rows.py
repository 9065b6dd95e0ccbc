"""Tables whose rows live on servers, as one trainer uses them. Every id belongs to one shard.

    pull   ids ─▶ divided by shard ─▶ asked of all shards ─▶ rows, in the order of the ids
    push   gradients are staged, and go with the next push of the dense parameters, shard by shard

`RemoteTables` has all tables of a model, and `RemoteRows` is one of them, as a `RowStore`.
`RowsAhead` asks for the rows of the next batch early. `Sharing` divides ids by shard. Between
processes of one host, rows travel through shared memory: see `row_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.comm.ps.link import Link
from echelon.comm.ps.messages import (
    GONE,
    SOME,
    Kind,
    RowHead,
    blank_state,
    most_rows,
    outline,
    pack_rows,
    pieces,
)
from echelon.comm.ps.row_files import Spool, State, placed, scratch
from echelon.comm.ps.row_memory import (
    AHEAD,
    AREAS,
    PULLS,
    PUSHES,
    RowRooms,
    carve,
    pull_shapes,
    push_shapes,
    room_for,
)
from echelon.core.errors import PeerError
from echelon.core.hashing import words
from echelon.core.types import RowSpec

Insist = Callable[[Callable[[], Any]], Any]

_KEY = 0x54A12D  # of the hash that assigns ids to shards
_HALF = np.uint64(32)


class RemoteTables:
    """All tables of a model. `links` leads to the shards while the trainer is connected."""

    def __init__(self, specs: Sequence[RowSpec]) -> None:
        self.specs = list(specs)
        self.links: Sequence[Link] = ()
        self._staged: dict[int, Staged] = {}
        self._loaded: dict[int, Mapping[str, Tensor]] = {}
        self._ahead: list[tuple[int, list[list[Tensor]]]] = []
        self._seq = 0
        self._rooms = RowRooms()
        self.ahead = RowsAhead(self._rooms)
        self.spool = Spool()
        """Holds rows on their way into a checkpoint."""
        self.insist: Insist = lambda question: question()
        """Calls a function, again if a shard was lost and a replica took its place."""

    def store(self, at: int) -> RemoteRows:
        return RemoteRows(self, at)

    def pull(self, at: int, ids: Tensor) -> Tensor:
        """Return the row of each id: valid until the next pull, since it may be shared memory."""
        if not self.links:
            raise PeerError("this member is not connected to the servers")
        early: Tensor | None = self.insist(lambda: self.ahead.take(self.links, at, ids))
        if early is not None:
            return early
        step = most_rows(self.specs[at].width)
        parts = [
            self.insist(lambda start=start: self._pull(at, ids[start : start + step]))  # type: ignore[misc]
            for start in range(0, max(1, len(ids)), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def expect(self, at: int, ids: Tensor) -> None:
        """Ask early for rows that will be pulled for the next batch."""
        if self.links:
            width = self.specs[at].width
            self.insist(lambda: self.ahead.ask(self.links, at, ids, width))

    def stage(self, at: int, gradients: Staged) -> None:
        self._staged[at] = gradients

    def prepare(self, seq: int) -> None:
        """Make all staged gradients part of push `seq`: `send` sends them ahead of it."""
        staged, self._staged = self._staged, {}
        self._ahead = [(at, self._parts(at, gradients)) for at, gradients in staged.items()]
        self._seq = seq

    def send(self, link: Link) -> None:
        """Send a shard its part of the gradients; again, if a replica took the shard's place."""
        shard = link.address.index
        self.ahead.drain(link)
        mine = [(at, parts[shard]) for at, parts in self._ahead if len(parts[shard][0])]
        if link.memory and mine:
            self._show(link, self._seq, mine)
            return
        for at, parts in mine:
            self._send(link, self._seq, at, parts)

    def _parts(self, at: int, gradients: Staged) -> list[list[Tensor]]:
        """Return for each shard ids, sums, and, if the table needs them, counts."""
        sharing = Sharing.of(gradients.ids, len(self.links))
        counts = gradients.counts if self.specs[at].admit > 1 else None
        columns = (gradients.ids, gradients.sums, counts)
        divided = [sharing.parts(column) for column in columns if column is not None]
        return [list(parts) for parts in zip(*divided, strict=True)]

    def drop(self) -> None:
        self._staged.clear()

    def load(self, at: int, state: Mapping[str, Tensor]) -> None:
        """Keep a table's saved state for `upload`."""
        self._loaded[at] = state

    def upload(self) -> None:
        """Send the loaded tables to the shards, whose tables are empty."""
        loaded, self._loaded = self._loaded, {}
        for at, state in loaded.items():
            what = f"the rows of table {self.specs[at].name!r} being taken"
            for number, piece in enumerate(pieces(state)):
                for shard, link in enumerate(self.links):
                    part = part_of(piece, shard, len(self.links))
                    head = {"table": at, "more": number > 0, "outline": outline(part)}
                    link.ask(Kind.ROW_LOAD, head, list(part.values()), what)

    def begin_cut(self) -> None:
        """Begin a checkpoint: `state` of each table follows."""
        self.spool.begin()

    def state(self, at: int) -> State:
        """Return a table's rows from all shards, fetched piece by piece while no trainer pushes."""
        what = f"the rows of table {self.specs[at].name!r}"
        asked = [link.ask(Kind.ROW_STATE, {"table": at}, what=what) for link in self.links]
        blanks = [blank_state(frame.fields().get("outline"), None, "meta") for frame in asked]
        columns = self.spool.columns(_joined(blanks))
        each = sum(value[:1].nbytes for value in blanks[0].values())
        count = max(1, SOME // each)
        with closing(columns):
            for link in self.links:
                for part in _parts(link, at, count, scratch(count * each), what):
                    columns.add(part)
            return columns.whole()

    def _pull(self, at: int, ids: Tensor) -> Tensor:
        sharing = Sharing.of(ids, len(self.links))
        what = f"rows of table {self.specs[at].name!r}"
        asked = [
            self._ask(link, at, part, what) if len(part) else None
            for link, part in zip(self.links, sharing.parts(ids), strict=True)
        ]
        found = [
            self._answered(link, at, size, rows, what)
            for link, size, rows in zip(self.links, sharing.sizes, asked, strict=True)
        ]
        return sharing.joined(found, self.specs[at].width)

    def _ask(self, link: Link, at: int, ids: Tensor, what: str) -> Tensor | None:
        """Ask a shard for rows; return where they will be, if that is shared memory."""
        if not link.memory:
            link.begin(Kind.ROWS, pack_rows(RowHead(at, len(ids))), [ids], what)
            return None
        shapes = pull_shapes(len(ids), self.specs[at].width)
        theirs, rows = carve(self._rooms.of(link).area(PULLS, room_for(shapes)), 0, shapes)
        theirs.copy_(ids)
        link.begin(Kind.ROWS, pack_rows(RowHead(at, len(ids), shared=True)), what=what)
        return rows

    def _answered(self, link: Link, at: int, size: int, shared: Tensor | None, what: str) -> Tensor:
        rows = torch.empty(size, self.specs[at].width) if shared is None else shared
        if size:
            link.answer(what)
            if shared is None:
                link.take([rows], what)
                link.pulled += rows.nbytes
        return rows

    def _send(self, link: Link, seq: int, at: int, parts: Sequence[Tensor]) -> None:
        step = most_rows(self.specs[at].width)
        for start in range(0, len(parts[0]), step):
            ids, sums, *counts = (part[start : start + step] for part in parts)
            head = pack_rows(RowHead(at, len(ids), bool(counts), start > 0))
            body = [ids, sums, *(count.int() for count in counts)]
            link.send(Kind.ROW_GRADIENTS, head, body, seq=seq, what="gradients of rows")
            link.pushed += sum(part.nbytes for part in body)

    def _show(self, link: Link, seq: int, mine: Sequence[tuple[int, list[Tensor]]]) -> None:
        """Send through shared memory, where all tables' gradients lie until the push is decided."""
        shapes = [
            push_shapes(len(parts[0]), self.specs[at].width, len(parts) == 3) for at, parts in mine
        ]
        area = self._rooms.of(link).area(PUSHES, sum(map(room_for, shapes)))
        place = 0
        for (at, parts), shape in zip(mine, shapes, strict=True):
            ids, sums, *counts = carve(area, place, shape)
            for there, here in zip((ids, *counts), (parts[0], *parts[2:]), strict=True):
                there.copy_(here)
            head = RowHead(at, len(ids), bool(counts), shared=True, place=place)
            what = "gradients of rows"
            link.send(Kind.ROW_GRADIENTS, pack_rows(head), seq=seq, what=what)
            sums.copy_(parts[1])  # the shard reads ids at once, but sums only at the push
            place += room_for(shape)


class Staged(NamedTuple):
    """One table's gradients for the next push: sums by id, and how many rows of the batch each."""

    ids: Tensor
    sums: Tensor
    counts: Tensor | None


def _joined(blanks: Sequence[State]) -> State:
    """Return the shapes of all shards' rows together; `facts` are the same on every shard."""
    return {
        name: torch.empty(
            value.shape
            if name == "facts"
            else (sum(len(part[name]) for part in blanks), *value.shape[1:]),
            dtype=value.dtype,
            device="meta",
        )
        for name, value in blanks[0].items()
    }


def _parts(link: Link, table: int, count: int, memory: Tensor, what: str) -> Iterator[State]:
    """Yield a shard's rows, `count` at a time; each part is valid until the next one."""
    start = 0
    while start >= 0:
        head = {"table": table, "start": start, "count": count}
        frame = link.ask(Kind.ROW_STATE, head, what=what)
        fields = frame.fields()
        part = placed(blank_state(fields.get("outline"), frame.size, "meta"), memory)
        link.take(list(part.values()), what)
        yield part
        start = int(fields.get("next", -1))


class RemoteRows:
    """One table, as a `RowStore`."""

    remote = True

    def __init__(self, tables: RemoteTables, at: int) -> None:
        self._tables, self._at = tables, at

    def pull(self, ids: Tensor) -> Tensor:
        return self._tables.pull(self._at, ids)

    def expect(self, ids: Tensor) -> None:
        self._tables.expect(self._at, ids)

    def push(
        self,
        ids: Tensor,
        gradients: Tensor,
        counts: Tensor | None = None,
        *,
        factor: float = 1.0,  # noqa: ARG002 (the servers know the schedule)
        version: int | None = None,  # noqa: ARG002 (and count versions)
    ) -> None:
        self._tables.stage(self._at, Staged(ids, gradients, counts))

    def state(self) -> State:
        return self._tables.state(self._at)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._tables.load(self._at, state)


class RowsAhead:
    """Prefetch of rows: those of the next batch are asked for while this one is computed.

    this batch                                     the next one
    forward ─▶ ROWS of the next ─▶ backward ─▶ push ─▶ forward: ROW_CHANGES ─▶ the same rows as a
               └─ the shards look them up meanwhile ─┘                        pull would give now

    Rows that updates have changed in between are sent again, and only those. So no result depends
    on what was asked for early.
    """

    def __init__(self, rooms: RowRooms) -> None:
        self._rooms = rooms
        self._areas = range(AHEAD, AREAS)
        self._turn = 0
        self._batches: list[_Batch] = []
        self._before: list[_Batch] = []

    def begin(self) -> None:
        """Begin to ask for another batch. Rows of the batch before stay valid."""
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
        """Return the rows as they are now, or None if they have to be pulled.

        They are valid until the batch after the next one is asked for.
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
        # Read all answers: one that is left would be taken for the answer to another question.
        known = [self._renewed(part, what) for part in parts]
        if not all(known):
            return None
        nothing = torch.empty(0, batch.width)
        rows = [nothing if part is None else part.rows for part in batch.parts]
        return batch.sharing.joined(rows, batch.width)

    def drain(self, link: Link) -> None:
        """Receive what a shard is sending, before much is sent to it.

        A shard that is sending does not receive, so both would wait for each other.
        """
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
        """Apply a shard's changes to its rows; return whether it knew which rows it had sent."""
        frame = part.link.answer(what)
        if frame.size:
            changed = frame.size // (8 + 4 * part.rows.shape[1])
            places = torch.empty(changed, dtype=torch.int64)
            rows = torch.empty(changed, part.rows.shape[1])
            part.link.take([places, rows], what)
            part.link.pulled += rows.nbytes
            part.rows.index_copy_(0, places, rows)
        return frame.head != GONE


class _Batch(NamedTuple):
    """Rows of one table that were asked for early, which one pull will take."""

    table: int
    ids: Tensor
    width: int
    sharing: Sharing
    parts: list[_Part | None]


class _Part(NamedTuple):
    """One shard's part of a `_Batch`."""

    link: Link
    number: int
    """Number of the question."""
    rows: Tensor


class Sharing(NamedTuple):
    """A division of ids by shard, which depends only on the ids and the number of shards."""

    order: Tensor | None
    """Places of the ids, shard by shard; None if there is one shard."""
    sizes: list[int]
    """Per shard, how many of the ids it has."""

    @classmethod
    def of(cls, ids: Tensor, shards: int) -> Sharing:
        if shards == 1:
            return cls(None, [len(ids)])
        owner = shard_of(ids, shards)
        order = np.argsort(owner, kind="stable")
        return cls(torch.from_numpy(order), np.bincount(owner, minlength=shards).tolist())

    def parts(self, values: Tensor) -> Sequence[Tensor]:
        if self.order is None:
            return [values]
        return torch.split(values.index_select(0, self.order), self.sizes)

    def joined(self, parts: Sequence[Tensor], width: int) -> Tensor:
        """Bring the shards' rows into the order of the ids."""
        if self.order is None:
            return parts[0]
        into = torch.empty(len(self.order), width)
        for places, rows in zip(self.order.split(self.sizes), parts, strict=True):
            into.index_copy_(0, places, rows)
        return into


def shard_of(ids: Tensor, shards: int) -> NDArray[np.int64]:
    """Return the shard of each id, spread evenly by a hash."""
    high = words(ids.numpy().view(np.uint64), _KEY) >> _HALF
    return (high * np.uint64(shards) >> _HALF).view(np.int64)


def part_of(state: Mapping[str, Tensor], shard: int, shards: int) -> dict[str, Tensor]:
    """Return a shard's rows of a table's state.

    Rows that are not admitted yet (`waiting…`) are divided by their own ids.
    """
    if shards == 1:
        return {name: value.contiguous() for name, value in state.items()}
    mine = torch.from_numpy(shard_of(state["ids"], shards) == shard)
    waiting = mine
    if "waiting_ids" in state:
        waiting = torch.from_numpy(shard_of(state["waiting_ids"], shards) == shard)
    return {
        name: value if name == "facts" else value[waiting if name.startswith("waiting") else mine]
        for name, value in state.items()
    }
