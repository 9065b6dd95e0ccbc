"""Sessions: what a server process does with the messages of one trainer or one other shard.

    Conversation   a trainer: set-up, uploads and checkpoints, pushes and pulls
    RowTalk        the part of it that is about rows of tables
    PeerTalk       another shard, at the gate

Every session has a thread of its own, which reads one frame after the other. Two kinds of trouble
are kept apart: a request that cannot be granted is answered with REFUSED, and the session goes on;
a frame that a correct peer would never send raises PeerError, which ends the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from echelon.comm.channel import Connection, Frame
from echelon.comm.ps import messages
from echelon.comm.ps.messages import (
    GONE,
    Kind,
    blank_state,
    most_rows,
    outline,
    unpack_chunk,
    unpack_push,
    unpack_rows,
)
from echelon.comm.ps.row_memory import (
    AREAS,
    LARGEST,
    PULLS,
    PUSHES,
    carve,
    pull_shapes,
    push_shapes,
)
from echelon.comm.ps.state import Part, blank
from echelon.core.errors import EchelonError, PeerError
from echelon.core.types import Lease
from echelon.optim.tables import Rows
from echelon.server.dispatch import Desk
from echelon.server.seats import PinnedSeat, Seat, WireSeat
from echelon.server.service import ShardService
from echelon.server.shard import Shard


class Conversation:
    """The session of one trainer with this shard.

    `memory`: the connection is a unix socket, over which trainer and shard can share memory.
    """

    def __init__(self, service: ShardService, connection: Connection, *, memory: bool) -> None:
        self._service, self._shard, self._memory = service, service.shard, memory
        self._connection = connection
        connection.limit = messages.LIMIT
        self._member = -1
        """The trainer's number, from its SET_UP on."""
        self._asked = 0
        """Number of the question that is being answered."""
        self._seat: Seat | None = None
        self._upload: tuple[Part, dict[str, Any]] | None = None
        """Room for an upload whose tensors come next, and what was said about it."""
        self._rows = RowTalk(service.shard, connection, memory=memory)

    def run(self) -> None:
        """Handle frames until the trainer leaves or its connection is lost."""
        # These come in every step and are answered, if at all, when the gate decides.
        handlers: Mapping[int, Callable[[Frame], None]] = {
            Kind.PUSH: self._push,
            Kind.GRADIENTS: self._gradients,
            Kind.ROW_GRADIENTS: lambda frame: self._rows.gradients(frame, self._member),
            Kind.PULL: self._pull,
        }
        # These are answered right away, by ANSWER or by REFUSED.
        questions: Mapping[int, Callable[[Frame], None]] = {
            Kind.SET_UP: self._set_up,
            Kind.ROOM: self._room,
            Kind.UPLOAD: self._begin_upload,
            Kind.STATE: self._end_upload,
            Kind.CUT: self._cut,
            Kind.ENTER: self._enter,
            Kind.CALL: self._call,
            Kind.ROWS: self._rows.rows,
            Kind.ROW_CHANGES: self._rows.changes,
            Kind.ROW_STATE: self._rows.state,
            Kind.ROW_LOAD: self._rows.load,
            Kind.ROW_ROOM: self._rows.room,
        }
        try:
            while (frame := self._connection.receive()) is not None and frame.kind != Kind.BYE:
                if frame.kind in handlers:
                    handlers[frame.kind](frame)
                elif frame.kind in questions:
                    self._grant(questions[frame.kind], frame)
                else:
                    raise PeerError(f"a frame of kind {frame.kind} is not for this shard")
        finally:
            self._connection.close()
            if self._seat is not None:
                self._shard.stand_up(self._member, self._seat)
                self._seat.close()
            self._service.left(self._member, self)

    def _grant(self, question: Callable[[Frame], None], frame: Frame) -> None:
        self._asked = frame.seq
        try:
            question(frame)
        except PeerError:
            raise
        except EchelonError as error:
            self._connection.send(Kind.REFUSED, {"reason": str(error)}, seq=self._asked)

    def _answer(self, head: Mapping[str, Any] | None = None, document: Any = None) -> None:
        body = [] if document is None else [messages.to_bytes(document)]
        self._connection.send(Kind.ANSWER, head or {}, body, seq=self._asked)

    # Set-up and shared memory

    def _set_up(self, frame: Frame) -> None:
        member = frame.fields().get("member")
        document = messages.take(self._connection, frame)
        if type(member) is not int or not 0 <= member < 1 << 32 or self._seat is not None:
            raise PeerError(f"a set-up by member {member!r}")
        self._member = member
        self._service.set_up(member, self, document)
        holding = self._shard.holding
        self._connection.limit = max(messages.LIMIT, 8 * holding.partition.bytes(holding.shard))
        if not self._memory:
            memory = torch.zeros(holding.partition.bytes(holding.shard), dtype=torch.uint8)
            gradients = holding.partition.carve(holding.shard, memory)
            self._sit(
                WireSeat(self._connection, gradients, holding.weights, apart=not holding.together)
            )
        self._answer(
            {
                "incarnation": self._shard.incarnation,
                "version": self._shard.version,
                "shared": holding.shared,
            }
        )

    def _room(self, frame: Frame) -> None:
        """Receive the trainer's memory for gradients, and for weights unless it shares the shard's.

        If it does, shard 0 answers with the memory of all shards' weights.
        """
        holding, shared = self._shard.holding, bool(frame.fields().get("shared"))
        if not self._memory or (shared and not holding.shared) or self._seat is not None:
            raise PeerError("memory is shared that nobody asked for")
        size = holding.layout.bytes
        gradients = self._connection.receive_segment(size)
        gradients.close()
        mine = holding.cut(gradients.tensor)
        if shared:
            self._sit(Seat(self._connection, mine))
        else:
            weights = self._connection.receive_segment(size)
            weights.close()
            theirs = holding.cut(weights.tensor)
            self._sit(PinnedSeat(self._connection, mine, theirs, holding.weights))
        self._answer()
        if shared and holding.shard == 0:
            assert holding.segment is not None
            self._connection.send_segment(holding.segment)

    def _sit(self, seat: Seat) -> None:
        self._seat = seat
        self._shard.sit(self._member, seat)

    # Uploads and checkpoints

    def _begin_upload(self, frame: Frame) -> None:
        document = messages.take(self._connection, frame)
        match document:
            case {"part": head, "incarnation": int(incarnation), "gate": dict()} if incarnation > 0:
                holding = self._shard.holding
                self._upload = blank(holding.partition, holding.shard, head), document
            case _:
                raise PeerError("an upload must have a part, an incarnation and the gate's state")
        self._answer()

    def _end_upload(self, _: Frame) -> None:
        if self._upload is None:
            raise PeerError("tensors of an upload that never began")
        (part, document), self._upload = self._upload, None
        self._connection.take(part.body())
        self._service.load(part, document["incarnation"], document["gate"])
        self._answer()

    def _cut(self, _: Frame) -> None:
        """Send the shard's part of a checkpoint, at one version."""
        with self._shard.order.quiet():
            part = self._shard.holding.flats.part()
            self._answer({}, {"part": part.head(), "gate": self._service.gate_state()})
            self._connection.send(Kind.ANSWER, {}, part.body(), seq=self._asked)

    # Generations and small calls

    def _enter(self, frame: Frame) -> None:
        match frame.fields():
            case {"generation": int(generation), "members": list(members)} if all(
                type(member) is int for member in members
            ):
                self._service.gate.enter(generation, members)
            case _:
                raise PeerError("a generation must have a number and members")
        self._answer()

    def _call(self, frame: Frame) -> None:
        self._answer({}, self._replied(frame.fields()))

    def _replied(self, question: dict[str, Any]) -> dict[str, Any]:
        service = self._service
        match question:
            case {"name": "figures"}:
                return service.figures(self._member)
            case {"name": "records", "recorded": int(recorded)}:
                return {"records": service.gate.records(recorded)}
            case {"name": "observe", "schedule": dict(schedule)}:
                service.gate.observe(schedule)
            case {"name": "uploaded", "incarnation": int(incarnation)}:
                service.uploaded(incarnation)
            case {"name": "rest"}:
                service.gate.rest(self._member)
            case {"name": "leave_out", "lease": [int(epoch), int(start), int(stop)]}:
                service.gate.leave_out(self._member, Lease(epoch, start, stop))
            case {"name": "ledger"}:
                return {"ledger": service.gate.state()["ledger"]}
            case _:
                raise PeerError(f"asks for {question.get('name')!r}, which is not known")
        return {}

    # Pushes and pulls

    def _gradients(self, frame: Frame) -> None:
        """Take one chunk of gradients, sent before its push is complete."""
        self._present().stage([unpack_chunk(frame.head)], frame)

    def _push(self, frame: Frame) -> None:
        head, seat = unpack_push(frame.head), self._present()
        seat.stage(head.chunks, frame)
        self._shard.staged(self._member, frame.seq, seat)
        self._service.pushed(self._member, frame.seq, head)

    def _pull(self, frame: Frame) -> None:
        self._present()
        self._service.gate.pull(self._member, frame.seq, begin=frame.head != b"look")

    def _present(self) -> Seat:
        if self._seat is None:
            raise PeerError("pushes or pulls before it is set up")
        return self._seat


# Rows of tables

_MOST_AHEAD = 1024
"""Early lookups that are remembered for each trainer."""
_MOST_ROWS = 1 << 40
"""Bound on row numbers in a request for a part of a table."""


class RowTalk:
    """Requests of one trainer about rows of tables.

    A trainer can look rows up one batch early, and fetch later only what has changed:

        ROWS           ids of the next batch ─▶ their rows, while the trainer computes this one
        ROW_CHANGES    number of that request ─▶ those of its rows that updates have changed since
    """

    def __init__(self, shard: Shard, connection: Connection, *, memory: bool) -> None:
        self._shard, self._connection, self._memory = shard, connection, memory
        self._areas: dict[int, Tensor] = {}
        """Memory that the trainer shares, by the number of its area."""
        self._ahead: dict[int, _Ahead] = {}
        """Early lookups, by request number."""

    def rows(self, frame: Frame) -> None:
        """Answer with the rows of some ids, in shared memory or in the answer itself."""
        head = unpack_rows(frame.head)
        held = self._shard.tables.at(head.table)
        if head.size > most_rows(held.spec.width):
            raise PeerError(f"asks for {head.size:,} rows of {held.spec.width} numbers at once")
        if head.shared:
            shapes = pull_shapes(head.size, held.spec.width)
            theirs, out = carve(self._area(head.area), head.place, shapes)
            ids = theirs.clone()  # kept after the answer, when the trainer may reuse its memory
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
        """Answer with the changed rows of an early lookup, or GONE. Each lookup is good for one
        such request."""
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
        """Answer with one part of a table's state, or with the sizes of all of it."""
        held = self._shard.tables.at(_table(frame))
        with self._shard.order.quiet():
            match frame.fields():
                case {"start": int(start), "count": int(count)} if (
                    0 <= start < _MOST_ROWS and 0 < count < _MOST_ROWS
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
        """Stage a table's gradients, as a part of the push with the frame's number."""
        head = unpack_rows(frame.head)
        if head.shared:
            held = self._shard.tables.at(head.table)
            shapes = push_shapes(head.size, held.spec.width, head.counted)
            ids, *rest = carve(self._area(PUSHES), head.place, shapes)
            body = [held.own(ids), *rest]  # a copy: the trainer could change checked ids
        else:
            body = self._shard.tables.blank(head, frame.size)
            self._connection.take(body)
        self._shard.tables.stage(member, frame.seq, head, body)

    def _remember(self, number: int, ahead: _Ahead) -> None:
        self._ahead[number] = ahead
        while len(self._ahead) > _MOST_AHEAD:  # the trainer never fetched their changes
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


class _Ahead(NamedTuple):
    """An early lookup, whose changes the trainer may fetch later."""

    held: Rows
    turn: int
    """The table's `turn` before the rows were read."""
    ids: Tensor
    rows: Tensor | None
    """The rows as the trainer has them, if they are in shared memory."""


# Other shards


class PeerTalk:
    """The session of another shard with the gate. gate_link.py draws the messages."""

    def __init__(self, desk: Desk, shard: Shard, connection: Connection) -> None:
        self._desk, self._shard, self._connection = desk, shard, connection
        self._index = -1

    def run(self) -> None:
        try:
            while (frame := self._connection.receive()) is not None and frame.kind != Kind.BYE:
                self._hear(frame)
        finally:
            if self._index >= 0:
                self._desk.lost(self._index, self._connection)

    def _hear(self, frame: Frame) -> None:
        match frame.kind, frame.fields():
            case Kind.HELLO, {
                "shard": int(index),
                "number": int(number),
                "incarnation": int(incarnation),
                "staged": list(staged),
                "squares": list(squares),
            } if 0 < index < self._shard.count:
                self._index = index
                pushes = [(int(member), int(seq)) for member, seq in staged]
                for entry, square in squares:
                    self._desk.squares(index, int(entry), float(square))
                self._desk.greet(index, self._connection, number, incarnation, pushes)
            case Kind.STAGED, {"member": int(member), "seq": int(seq)} if self._index > 0:
                self._desk.staged(self._index, member, seq)
            case Kind.SQUARES, {"number": int(number), "square": int() | float() as square} if (
                self._index > 0
            ):
                scale = self._desk.squares(self._index, number, float(square))
                if scale is not None:
                    self._connection.send(Kind.FACTOR, {"number": number, "scale": scale})
            case Kind.SEGMENT, {"size": int(size)}:
                self._lend(size)
            case kind, _:
                raise PeerError(f"said {kind} to the gate, which makes no sense")

    def _lend(self, size: int) -> None:
        """Share the memory of all weights with a shard on this host, if its size fits."""
        segment = self._shard.holding.segment
        fits = segment is not None and segment.size == size
        self._connection.send(Kind.ANSWER, {"shared": fits})
        if segment is not None and fits:
            self._connection.send_segment(segment)
