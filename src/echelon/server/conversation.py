"""What one trainer says to a shard, heard by a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from echelon.comm.channel import Connection, Frame
from echelon.comm.servers import documents
from echelon.comm.servers.messages import Kind, unpack_chunk, unpack_push
from echelon.comm.servers.part import Part, blank
from echelon.core.errors import EchelonError, PeerError
from echelon.core.types import Lease
from echelon.server.row_talk import RowTalk
from echelon.server.seats import PinnedSeat, Seat, WireSeat

if TYPE_CHECKING:
    from echelon.server.role import Role


class Conversation:
    """A question that cannot be granted is refused; whoever makes no sense is hung up on."""

    def __init__(self, role: Role, connection: Connection, *, memory: bool) -> None:
        self._role, self._shard, self._memory = role, role.shard, memory
        self._connection = connection
        connection.limit = documents.LIMIT
        self.member = -1
        self._asked = 0
        self._seat: Seat | None = None
        self._upload: tuple[Part, dict[str, Any]] | None = None
        self._rows = RowTalk(role.shard, connection, memory=memory)

    def run(self) -> None:
        """Until the trainer is gone, or this process ends."""
        handlers: Mapping[int, Callable[[Frame], None]] = {
            Kind.PUSH: self._push,
            Kind.GRADIENTS: self._gradients,
            Kind.ROW_GRADIENTS: lambda frame: self._rows.gradients(frame, self.member),
            Kind.PULL: self._pull,
        }
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
                self._shard.stand_up(self.member, self._seat)
                self._seat.close()
            self._role.left(self)

    def _grant(self, question: Callable[[Frame], None], frame: Frame) -> None:
        self._asked = frame.seq
        try:
            question(frame)
        except PeerError:
            raise
        except EchelonError as error:
            self._connection.send(Kind.REFUSED, {"reason": str(error)}, seq=self._asked)

    def _answer(self, head: Mapping[str, Any] | None = None, document: Any = None) -> None:
        body = [] if document is None else [documents.to_bytes(document)]
        self._connection.send(Kind.ANSWER, head or {}, body, seq=self._asked)

    # Questions.

    def _set_up(self, frame: Frame) -> None:
        member = frame.fields().get("member")
        document = documents.take(self._connection, frame)
        if type(member) is not int or not 0 <= member < 1 << 32 or self._seat is not None:
            raise PeerError(f"a set-up by member {member!r}")
        self.member = member
        self._role.set_up(self, document)
        holding = self._shard.holding
        self._connection.limit = max(documents.LIMIT, 8 * holding.partition.bytes(holding.shard))
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
        """The trainer's memory; over a unix socket alone."""
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

    def _begin_upload(self, frame: Frame) -> None:
        document = documents.take(self._connection, frame)
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
        self._role.load(part, document["incarnation"], document["gate"])
        self._answer()

    def _cut(self, _: Frame) -> None:
        with self._shard.order.quiet():
            part = self._shard.holding.flats.part()
            self._answer({}, {"part": part.head(), "gate": self._role.gate_state()})
            self._connection.send(Kind.ANSWER, {}, part.body(), seq=self._asked)

    def _enter(self, frame: Frame) -> None:
        match frame.fields():
            case {"generation": int(generation), "members": list(members)} if all(
                type(member) is int for member in members
            ):
                self._role.gate.enter(generation, members)
            case _:
                raise PeerError("a generation must have a number and members")
        self._answer()

    def _call(self, frame: Frame) -> None:
        self._answer({}, self._replied(frame.fields()))

    def _replied(self, question: dict[str, Any]) -> dict[str, Any]:
        role = self._role
        match question:
            case {"name": "figures"}:
                return role.figures(self.member)
            case {"name": "records", "recorded": int(recorded)}:
                return {"records": role.gate.records(recorded)}
            case {"name": "observe", "schedule": dict(schedule)}:
                role.gate.observe(schedule)
            case {"name": "uploaded", "incarnation": int(incarnation)}:
                role.uploaded(incarnation)
            case {"name": "rest"}:
                role.gate.rest(self.member)
            case {"name": "leave_out", "lease": [int(epoch), int(start), int(stop)]}:
                role.gate.leave_out(self.member, Lease(epoch, start, stop))
            case {"name": "ledger"}:
                return {"ledger": role.gate.state()["ledger"]}
            case _:
                raise PeerError(f"asks for {question.get('name')!r}, which is not known")
        return {}

    # Updates.

    def _gradients(self, frame: Frame) -> None:
        self._present().stage([unpack_chunk(frame.head)], frame)

    def _push(self, frame: Frame) -> None:
        head, seat = unpack_push(frame.head), self._present()
        seat.stage(head.chunks, frame)
        self._shard.staged(self.member, frame.seq, seat)
        self._role.pushed(self, frame.seq, head)

    def _pull(self, frame: Frame) -> None:
        self._present()
        self._role.gate.pull(self.member, frame.seq, begin=frame.head != b"look")

    def _sit(self, seat: Seat) -> None:
        self._seat = seat
        self._shard.sit(self.member, seat)

    def _present(self) -> Seat:
        if self._seat is None:
            raise PeerError("pushes or pulls before it is set up")
        return self._seat
