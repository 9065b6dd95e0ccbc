"""Shards and the gate: who has what staged, and what all do next.

    shard k                                     shard 0, the gate
    HELLO number, incarnation, staged  ───────▶ resends what comes after that number
    STAGED member, seq                 ───────▶ the push is whole here: is it everywhere?
    ◀─────── ENTRY number, version, pushes, whom to give the weights
    SQUARES number, square             ───────▶ where an update is clipped by its norm
    ◀─────── FACTOR number, scale

A shard that lost its gate, or the other way round, says hello again. Entries of another incarnation
(an upload) than a shard's own are not for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from echelon.comm.channel import Connection, Frame, Segment, connect
from echelon.comm.channel.sockets import Address
from echelon.comm.servers import documents
from echelon.comm.servers.link import is_here
from echelon.comm.servers.messages import Kind
from echelon.core.errors import PeerError
from echelon.server.entry import Entry
from echelon.server.settings import ServerSettings
from echelon.server.shard import Shard

_PAUSE = 0.05
_PATIENCE = 2.0
_LOOK = 0.3
_KEPT = 16


class GateLink:
    """Of a shard that is not the gate. Its thread carries the gate's entries out."""

    def __init__(self, settings: ServerSettings, shard: Shard, halted: Callable[[], bool]) -> None:
        self._settings, self._shard, self._halted = settings, shard, halted
        self._connection: Connection | None = None
        self._squares: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        """For a gate that takes over, and has to know again."""
        shard.measure = self._measure

    def run(self) -> None:
        """Talk to the gate, whoever it is, until this process ends."""
        while not self._halted():
            try:
                self._connection = dial_gate(self._settings, f"shard {self._shard.index}")
                self.greet()
                while not self._halted():
                    if (frame := self._connection.receive(_LOOK)) is not None:
                        self._hear(frame)
                    self._shard.order.work()
            except PeerError:  # it is another one's turn
                time.sleep(_PAUSE)
            finally:
                self.close()

    def greet(self) -> None:
        """Say how far this shard is; also after an upload."""
        shard = self._shard
        hello = {
            "shard": shard.index,
            "number": shard.number,
            "incarnation": shard.incarnation,
            "staged": [list(push) for push in shard.staged_pushes()],
            "squares": list(self._squares),
        }
        self._send(Kind.HELLO, hello)

    def staged(self, member: int, seq: int) -> None:
        self._send(Kind.STAGED, {"member": member, "seq": seq})

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _send(self, kind: Kind, head: dict[str, Any]) -> None:
        """Nothing is lost if the gate is: the next one is told all of it."""
        connection = self._connection
        if connection is not None:
            try:
                connection.send(kind, head)
            except PeerError:
                return

    def _hear(self, frame: Frame) -> None:
        if frame.kind == Kind.FACTOR:  # of an update that is made here already
            return
        if frame.kind != Kind.ENTRY:
            raise PeerError(f"the gate sent a frame of kind {frame.kind}")
        fields = frame.fields()
        if fields.pop("incarnation", None) == self._shard.incarnation:
            entry = Entry.from_json(fields)
            if entry.number > self._shard.heard:  # a gate that takes over tells some again
                self._shard.add(entry)

    def _measure(self, entry: Entry, square: float) -> float:
        """In this link's own thread, so that it has to listen itself."""
        connection = self._connection
        if connection is None:
            raise PeerError("the gate is lost")
        self._squares.append((entry.number, square))
        connection.send(Kind.SQUARES, {"number": entry.number, "square": square})
        while (frame := connection.receive(self._settings.deadline)) is not None:
            if frame.kind == Kind.FACTOR:
                fields = frame.fields()
                if fields.get("number") == entry.number:
                    return float(fields["scale"])
            else:
                self._hear(frame)
        raise PeerError("the gate said nothing")


def borrow(settings: ServerSettings, size: int) -> Segment | None:
    """The memory of all shards' weights, from the gate, if it is on this host and has any."""
    name = settings.shards[0].name
    if not is_here(name):
        return None
    role = f"shard {settings.shard} asks"
    connection = connect(name, settings.key, role=role, deadline=_PATIENCE)
    try:
        connection.send(Kind.SEGMENT, {"size": size})
        frame = connection.receive(settings.deadline)
        if frame is None or not frame.fields().get("shared"):
            return None
        segment = connection.receive_segment(size)
        connection.send(Kind.BYE)
        return segment
    finally:
        connection.close()


def dial_gate(settings: ServerSettings, role: str) -> Connection:
    address = settings.shards[0]
    where: Address = address.name if is_here(address.name) else (address.host, address.port)
    connection = connect(where, settings.key, role=role, deadline=_PATIENCE)
    connection.limit = documents.LIMIT
    return connection
