"""What another shard says to the gate."""

from __future__ import annotations

from echelon.comm.channel import Connection, Frame
from echelon.comm.servers.messages import Kind
from echelon.core.errors import PeerError
from echelon.server.desk import Desk
from echelon.server.shard import Shard


class PeerTalk:
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
        """The memory of all weights, for a shard of this host."""
        segment = self._shard.holding.segment
        fits = segment is not None and segment.size == size
        self._connection.send(Kind.ANSWER, {"shared": fits})
        if segment is not None and fits:
            self._connection.send_segment(segment)
